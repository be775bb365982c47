//! The manifests for Terraform: they can be read, everything they name is declared, and they ask for the same
//! service as the manifests of Cloud Run, in both shapes.

use std::collections::BTreeSet;

use baton::config;
use hcl::{
    Block, Body, Expression,
    eval::{Context, Evaluate},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::repo_files::read;

fn terraform() -> Body {
    hcl::parse(&read("manifests/terraform/main.tf")).unwrap()
}

/// The blocks of a kind, with these labels.
fn blocks<'a>(body: &'a Body, kind: &str, labels: &[&str]) -> Vec<&'a Block> {
    let has = |block: &&Block| {
        block.identifier() == kind && block.labels().iter().map(|label| label.as_str()).eq(labels.iter().copied())
    };
    body.blocks().filter(has).collect()
}

fn block<'a>(body: &'a Body, kind: &str, labels: &[&str]) -> &'a Body {
    let found = blocks(body, kind, labels);
    assert_eq!(found.len(), 1, "{kind} {labels:?}");
    found[0].body()
}

fn value(body: &Body, name: &str) -> Expression {
    let attribute = body.attributes().find(|attribute| attribute.key() == name);
    attribute.unwrap_or_else(|| panic!("no {name}")).expr().clone()
}

/// The value of a local, with the variables set as the manifests of Cloud Run have them.
fn local(body: &Body, name: &str) -> Value {
    let locals = block(body, "locals", &[]);
    let mut context = Context::new();
    let image = "REGION-docker.pkg.dev/PROJECT/baton";
    context.declare_var(
        "var",
        hcl::value!({
            "project" = "PROJECT"
            "region" = "REGION"
            "image" = (format!("{image}/baton:latest"))
            "image_api" = (format!("{image}/baton-api:latest"))
        }),
    );
    let buckets = value(locals, "buckets").evaluate(&context).unwrap();
    context.declare_var("local", hcl::value!({ "buckets" = (buckets) }));
    serde_json::to_value(value(locals, name).evaluate(&context).unwrap()).unwrap()
}

/// A container of a manifest of Cloud Run, in the words of the local.
fn container(spec: &Value, dependencies: &Value) -> Value {
    let (mut env, mut secrets) = (json!({}), vec![]);
    for pair in spec["env"].as_array().unwrap() {
        match pair.get("value") {
            Some(value) => env[pair["name"].as_str().unwrap()] = value.clone(),
            None => secrets.push(pair["name"].clone()),
        }
    }
    let probe = |probe: &Value| json!({"path": probe["httpGet"]["path"], "port": probe["httpGet"]["port"]});
    let list = |field: &Value| field.as_array().cloned().unwrap_or_default();
    let mut mounts = json!({});
    for mount in list(&spec["volumeMounts"]) {
        mounts[mount["name"].as_str().unwrap()] = mount["mountPath"].clone();
    }
    json!({
        "name": spec["name"],
        "image": spec["image"],
        "args": spec["args"],
        "cpu": spec["resources"]["limits"]["cpu"],
        "memory": spec["resources"]["limits"]["memory"],
        "ports": list(&spec["ports"]).iter().map(|port| port["containerPort"].clone()).collect::<Vec<_>>(),
        "after": list(&dependencies[spec["name"].as_str().unwrap()]),
        "secrets": secrets,
        "env": env,
        "startup": probe(&spec["startupProbe"]),
        "liveness": spec.get("livenessProbe").map(probe).into_iter().collect::<Vec<_>>(),
        "mounts": mounts,
    })
}

#[test]
fn terraform_asks_for_the_containers_of_both_shapes() {
    let body = terraform();
    let ours = local(&body, "containers");
    for (file, halves) in [("manifests/cloud-run.yaml", false), ("manifests/cloud-run-halves.yaml", true)] {
        let service = Value::deserialize(serde_yaml_ng::Deserializer::from_str(&read(file))).unwrap();
        let template = &service["spec"]["template"];
        let dependencies = &template["metadata"]["annotations"]["run.googleapis.com/container-dependencies"];
        let dependencies = dependencies.as_str().map_or(Value::Null, |text| serde_json::from_str(text).unwrap());
        let theirs: Vec<_> = template["spec"]["containers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| container(one, &dependencies))
            .collect();
        let ours: Vec<_> = ours.as_array().unwrap().iter().filter(|one| one["in_half"] == halves).cloned().collect();
        let ours: Vec<_> = ours
            .into_iter()
            .map(|mut one| {
                one.as_object_mut().unwrap().remove("in_half");
                one
            })
            .collect();
        assert_eq!(ours, theirs, "{file}");
        for name in ours.iter().flat_map(|one| one["env"].as_object().unwrap().keys()) {
            assert!(config::find(name).is_some(), "Terraform sets {name}, which the server does not read");
        }
        let volumes: Vec<_> = local(&body, "volumes").as_array().unwrap().to_vec();
        let volumes = volumes.iter().filter(|one| one["for_one"] == true || halves);
        let volumes: Vec<_> = volumes.map(|one| (one["name"].clone(), one["size"].clone())).collect();
        let theirs = template["spec"]["volumes"].as_array().unwrap().iter();
        let theirs: Vec<_> = theirs.map(|one| (one["name"].clone(), one["emptyDir"]["sizeLimit"].clone())).collect();
        assert_eq!(volumes, theirs, "{file}");
    }
}

#[test]
fn terraform_asks_the_same_of_the_platform_and_of_the_buckets() {
    let body = terraform();
    let says = |body: &Body, name: &str, expected: Value| {
        assert_eq!(serde_json::to_value(value(body, name)).unwrap(), expected, "{name}");
    };
    let service = block(&body, "resource", &["google_cloud_run_v2_service", "baton"]);
    let template = block(service, "template", &[]);
    says(template, "execution_environment", json!("EXECUTION_ENVIRONMENT_GEN2"));
    says(template, "session_affinity", json!(true));
    says(template, "max_instance_request_concurrency", json!(1));
    says(template, "timeout", json!("3600s"));
    let content = block(block(template, "dynamic", &["containers"]), "content", &[]);
    says(block(content, "resources", &[]), "cpu_idle", json!(false));
    let bucket = block(&body, "resource", &["google_storage_bucket", "baton"]);
    says(bucket, "public_access_prevention", json!("enforced"));
    says(bucket, "uniform_bucket_level_access", json!(true));
    says(block(bucket, "soft_delete_policy", &[]), "retention_duration_seconds", json!(0));
    says(block(bucket, "versioning", &[]), "enabled", json!(false));
    // The rules of lifecycle.json.
    let rules: Vec<_> = blocks(bucket, "lifecycle_rule", &[])
        .into_iter()
        .map(|rule| {
            let action = value(block(rule.body(), "action", &[]), "type");
            let condition = block(rule.body(), "condition", &[]);
            let mut shown = json!({"age": value(condition, "age")});
            if let Some(prefix) = condition.attributes().find(|one| one.key() == "matches_prefix") {
                shown["matchesPrefix"] = serde_json::to_value(prefix.expr()).unwrap();
            }
            json!({"action": {"type": action}, "condition": shown})
        })
        .collect();
    let theirs: Value = serde_json::from_str(&read("manifests/lifecycle.json")).unwrap();
    assert_eq!(json!(rules), theirs["rule"]);
    // What holds sandboxes is destroyed only after an apply that allows it.
    assert_eq!(value(service, "deletion_protection").to_string(), "var.deletion_protection");
    assert_eq!(value(bucket, "force_destroy").to_string(), "!var.deletion_protection");
    assert_eq!(value(block(&body, "variable", &["deletion_protection"]), "default"), Expression::Bool(true));
    // A revision that may not read its secrets yet does not start.
    let waits = value(service, "depends_on").to_string();
    for resource in [
        "google_secret_manager_secret_iam_member.keys",
        "google_secret_manager_secret_iam_member.admin",
        "google_secret_manager_secret_iam_member.hmac",
        "google_storage_bucket_iam_member.baton",
    ] {
        assert!(waits.contains(resource), "the service does not wait for {resource}: {waits}");
    }
}

/// The secret that a container's variable comes from has the same name in both, and goes into no state file.
#[test]
fn terraform_makes_the_secrets_that_the_manifests_of_cloud_run_name() {
    let body = terraform();
    let Expression::Object(secrets) = value(block(&body, "locals", &[]), "secrets") else { panic!("no map") };
    let secret_of = |variable: &str| {
        let fields = secrets.iter().find(|(key, _)| key.to_string() == variable).map(|(_, fields)| fields);
        let Some(Expression::Object(fields)) = fields else { panic!("no secret for {variable}") };
        fields.iter().find(|(key, _)| key.to_string() == "secret").unwrap().1.to_string()
    };
    let service = Value::deserialize(serde_yaml_ng::Deserializer::from_str(&read("manifests/cloud-run.yaml"))).unwrap();
    let env = service.pointer("/spec/template/spec/containers/0/env").unwrap().as_array().unwrap();
    let named: Vec<_> = env.iter().filter(|pair| pair.get("valueFrom").is_some()).collect();
    assert_eq!(named.len(), secrets.len());
    for pair in named {
        let variable = pair["name"].as_str().unwrap();
        let from = secret_of(variable);
        let resource = from.split('.').nth(1).unwrap();
        let secret = block(&body, "resource", &["google_secret_manager_secret", resource]);
        let id = serde_json::to_value(value(secret, "secret_id")).unwrap();
        assert_eq!(id, pair["valueFrom"]["secretKeyRef"]["name"], "{variable}");
        let version = block(&body, "resource", &["google_secret_manager_secret_version", resource]);
        let attributes: Vec<_> = version.attributes().map(|one| one.key()).collect();
        assert!(attributes.contains(&"secret_data_wo") && !attributes.contains(&"secret_data"), "{attributes:?}");
        for kept in ["sensitive", "ephemeral"] {
            let variable = value(version, "secret_data_wo").to_string().replace("var.", "");
            assert_eq!(value(block(&body, "variable", &[&variable]), kept), Expression::Bool(true), "{variable}");
        }
    }
}

#[test]
fn everything_that_terraform_names_is_declared() {
    let body = terraform();
    let text = read("manifests/terraform/main.tf");
    let code: String = text.lines().map(|line| line.split('#').next().unwrap().to_owned() + "\n").collect();
    let words = code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'));
    let mut seen = BTreeSet::new();
    for word in words {
        let mut parts = word.split('.');
        let (Some(first), Some(second)) = (parts.next(), parts.next()) else { continue };
        let is_declared = match first {
            "var" => !blocks(&body, "variable", &[second]).is_empty(),
            "local" => block(&body, "locals", &[]).attributes().any(|one| one.key() == second),
            kind if kind.starts_with("google_") => !blocks(&body, "resource", &[kind, second]).is_empty(),
            _ => continue,
        };
        assert!(is_declared, "{word} is declared nowhere");
        seen.insert(word);
    }
    assert!(seen.len() > 15, "only {} names were found", seen.len());
    for variable in body.blocks().filter(|block| block.identifier() == "variable") {
        let name = variable.labels()[0].as_str();
        assert!(seen.contains(format!("var.{name}").as_str()), "nothing uses the variable {name}");
    }
}
