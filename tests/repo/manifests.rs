//! What an operator deploys: every manifest fits the schema it claims, every setting in it is one of
//! the server's, and every figure on the dashboard is one the server has.

use std::{collections::BTreeSet, time::Duration};

use baton::{
    config::{self, Config, Flags, LeaseTimes},
    metrics::{ActionOutcome, ConnectionEnd, Direction, ExecEnd, ExecPipe, Metrics, Missed, StoreAnswer, StoreVerb},
};
use baton_protocol::limits::{Bounds, size};
use serde_json::Value;

use crate::repo_files::read;

fn json(path: &str) -> Value {
    serde_json::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The documents of a YAML file.
fn documents(path: &str) -> Vec<Value> {
    use serde::Deserialize;
    let text = read(path);
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|one| Value::deserialize(one).unwrap_or_else(|error| panic!("{path}: {error}"))).collect()
}

/// What does not fit, in sentences. Knows the few words of JSON Schema that the schemas here use.
fn misfits(value: &Value, schema: &Value, at: &str) -> Vec<String> {
    let mut found = vec![];
    if let Some(choices) = schema["enum"].as_array()
        && !choices.contains(value)
    {
        found.push(format!("{at} is {value}, and may be one of {}", schema["enum"]));
    }
    let right = match schema["type"].as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        Some(other) => panic!("the schema says type {other} at {at}"),
        None => true,
    };
    if !right {
        found.push(format!("{at} is {value}, which is no {}", schema["type"]));
    }
    let number = value.as_i64();
    if let (Some(number), Some(least)) = (number, schema["minimum"].as_i64())
        && number < least
    {
        found.push(format!("{at} is {number}, below {least}"));
    }
    if let (Some(number), Some(most)) = (number, schema["maximum"].as_i64())
        && number > most
    {
        found.push(format!("{at} is {number}, above {most}"));
    }
    for item in value.as_array().into_iter().flatten().enumerate() {
        found.extend(misfits(item.1, &schema["items"], &format!("{at}[{}]", item.0)));
    }
    if let Some(fields) = value.as_object() {
        for (name, field) in fields {
            match schema["properties"].get(name) {
                Some(schema) => found.extend(misfits(field, schema, &format!("{at}.{name}"))),
                None if schema["additionalProperties"] == false => found.push(format!("{at} has no field {name}")),
                None => {}
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                found.push(format!("{at} lacks {name}"));
            }
        }
    }
    found
}

const CLOUD_RUN: [&str; 3] =
    ["manifests/cloud-run.yaml", "manifests/cloud-run-halves.yaml", "manifests/cloud-run-mounted.yaml"];
const KUBERNETES: [&str; 2] = ["manifests/kubernetes.yaml", "manifests/kubernetes-one-node.yaml"];
const KUBERNETES_SECRET: &str = "manifests/kubernetes-secret.yaml";

#[test]
fn every_manifest_fits_the_schema_it_claims() {
    for (schema, files) in [
        ("manifests/schema/cloud-run.json", CLOUD_RUN.as_slice()),
        ("manifests/schema/kubernetes.json", KUBERNETES.as_slice()),
        ("manifests/schema/kubernetes.json", &[KUBERNETES_SECRET]),
    ] {
        let schema = json(schema);
        for file in files {
            let documents = documents(file);
            assert!(!documents.is_empty(), "{file} is empty");
            for document in documents {
                let kind = document["kind"].as_str().unwrap();
                assert!(schema.get(kind).is_some(), "{file}: no schema for {kind}");
                assert_eq!(misfits(&document, &schema[kind], kind), [""; 0], "{file}");
            }
        }
    }
}

#[test]
fn a_slip_of_the_pen_does_not_fit() {
    let schema = &json("manifests/schema/cloud-run.json")["Service"];
    let good = &documents(CLOUD_RUN[0])[0];
    let slips: [(&str, Value, &str); 5] = [
        ("/spec/template/spec/timeoutSeconds", 3601.into(), "above 3600"),
        ("/spec/template/spec/containerConcurrency", "1".into(), "no \"integer\""),
        (
            "/spec/template/metadata/annotations",
            serde_json::json!({"run.googleapis.com/cpu-throtling": "false"}),
            "no field",
        ),
        ("/spec/template/spec/containers/0/livenessProbe", serde_json::json!({"httpGet": {"path": "/"}}), "lacks port"),
        ("/kind", "Servise".into(), "may be one of"),
    ];
    for (at, value, complaint) in slips {
        let mut bad = good.clone();
        *bad.pointer_mut(at).unwrap() = value;
        let found = misfits(&bad, schema, "Service");
        assert!(found.len() == 1 && found[0].contains(complaint), "{at}: {found:?}");
    }
}

/// Every object with a `name` in a list called `env`.
fn set_in(value: &Value, found: &mut BTreeSet<String>) {
    if let Some(list) = value.get("env").and_then(Value::as_array) {
        found.extend(list.iter().map(|one| one["name"].as_str().unwrap().to_owned()));
    }
    match value {
        Value::Array(items) => items.iter().for_each(|item| set_in(item, found)),
        Value::Object(fields) => fields.values().for_each(|field| set_in(field, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn every_variable_that_a_manifest_sets_is_one_the_server_reads() {
    for file in CLOUD_RUN.iter().chain(&KUBERNETES) {
        let mut names = BTreeSet::new();
        documents(file).iter().for_each(|document| set_in(document, &mut names));
        assert!(names.len() > 2, "{file} sets nothing");
        for name in names {
            assert!(config::find(&name).is_some(), "{file} sets {name}, which the server does not read");
        }
    }
}

/// Settings of one half alone; every other one is about the instance, and both halves act on it.
const OF_ONE_HALF: [&str; 9] = [
    "PORT",
    "BATON_API_KEYS",
    "BATON_ADMIN_KEY",
    "BATON_API_USER",
    "BATON_ADMIN_LISTEN",
    "BATON_ROOTFS_CACHE",
    "BATON_ARCHIVE_SIZE",
    "BATON_ORIGINS",
    "BATON_RATE_LIMIT",
];

/// Bytes of a quantity such as `2Gi`.
fn quantity(text: &str) -> u64 {
    size(&format!("{text}B")).unwrap_or_else(|| panic!("{text} is no quantity"))
}

/// What a container sets one of its variables to.
fn set_to<'a>(container: &'a Value, name: &str) -> Option<&'a Value> {
    container["env"].as_array()?.iter().find(|pair| pair["name"] == name)
}

/// What is missing in a manifest for strangers to be let in, in sentences.
fn open_doors(file: &str, document: &Value) -> Vec<String> {
    let Some(spec) = document.pointer("/spec/template/spec") else { return vec![] };
    let is_cloud_run = file.contains("cloud-run");
    let mut found = vec![];
    for container in spec["containers"].as_array().unwrap() {
        let (name, verb) = (container["name"].as_str().unwrap(), container["args"][0].as_str().unwrap());
        let mut complain = |what: &str| found.push(format!("{file}: {name} {what}"));
        let is_secret = |name: &str| set_to(container, name).is_some_and(|pair| pair.get("valueFrom").is_some());
        if !is_secret("BATON_HMAC_KEY") {
            complain("has no BATON_HMAC_KEY from a secret");
        }
        for name in ["BATON_API_KEYS", "BATON_ADMIN_KEY"] {
            if verb != "reconciler" && !is_secret(name) {
                complain(&format!("has no {name} from a secret"));
            }
        }
        let bounds = set_to(container, "BATON_LIMITS").and_then(|pair| Bounds::parse(pair["value"].as_str()?));
        let limits = bounds.unwrap_or_default().ceiling;
        let (Some(memory), Some(disk), Some(_), Some(_)) = (limits.memory, limits.disk, limits.pids, limits.files)
        else {
            complain("sets no BATON_LIMITS of memory, disk, pids and files");
            continue;
        };
        if verb == "api" {
            continue;
        }
        let count = set_to(container, "BATON_MAX_SANDBOXES").and_then(|pair| pair["value"].as_str()?.parse().ok());
        let count: u64 = count.expect("it says how many");
        let room = quantity(container["resources"]["limits"]["memory"].as_str().expect("it says how much"));
        let state = spec["volumes"].as_array().unwrap().iter().find(|one| one["name"] == "state").unwrap();
        let state = quantity(state["emptyDir"]["sizeLimit"].as_str().unwrap());
        // The image of a checkpoint has both once more. Files are memory on Cloud Run; elsewhere they lie in the state
        // directory.
        let image = memory + disk;
        let (in_memory, on_disk) = if is_cloud_run { (2 * image, image) } else { (memory, disk + image) };
        if count * in_memory > room {
            complain("gives its sandboxes more memory than it has");
        }
        if count * on_disk > state {
            complain("gives its sandboxes more disk than it has");
        }
    }
    found
}

#[test]
fn every_manifest_has_limits_that_fit_and_keys_from_secrets() {
    for file in CLOUD_RUN.iter().chain(&KUBERNETES) {
        let found: Vec<_> = documents(file).iter().flat_map(|document| open_doors(file, document)).collect();
        assert_eq!(found, [""; 0]);
    }
}

#[test]
fn a_manifest_without_one_of_them_is_found() {
    let good = &documents(CLOUD_RUN[0])[0];
    let env = "/spec/template/spec/containers/0/env";
    for (name, complaint) in [
        ("BATON_HMAC_KEY", "no BATON_HMAC_KEY"),
        ("BATON_API_KEYS", "no BATON_API_KEYS"),
        ("BATON_ADMIN_KEY", "no BATON_ADMIN_KEY"),
        ("BATON_LIMITS", "no BATON_LIMITS"),
    ] {
        let mut bad = good.clone();
        bad.pointer_mut(env).unwrap().as_array_mut().unwrap().retain(|pair| pair["name"] != name);
        let found = open_doors(CLOUD_RUN[0], &bad);
        assert!(found.len() == 1 && found[0].contains(complaint), "{name}: {found:?}");
    }
    for (limits, complaint) in [
        ("memory=512MiB,disk=256MiB,pids=512", "no BATON_LIMITS"),
        ("memory=1GiB,disk=256MiB,pids=512,files=4096", "more memory"),
        ("memory=64MiB/1GiB,disk=64MiB/256MiB,pids=512,files=4096", "more memory"),
    ] {
        let mut bad = good.clone();
        let pair = bad.pointer_mut(env).unwrap().as_array_mut().unwrap().iter_mut();
        pair.filter(|pair| pair["name"] == "BATON_LIMITS").for_each(|pair| pair["value"] = limits.into());
        let found = open_doors(CLOUD_RUN[0], &bad);
        assert!(found.first().is_some_and(|found| found.contains(complaint)), "{limits}: {found:?}");
    }
}

/// Every object that stands under a field of this name.
fn under<'a>(value: &'a Value, name: &str, found: &mut Vec<&'a Value>) {
    found.extend(value.get(name));
    match value {
        Value::Array(items) => items.iter().for_each(|item| under(item, name, found)),
        Value::Object(fields) => fields.values().for_each(|field| under(field, name, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn the_secret_of_kubernetes_has_the_keys_that_its_pods_ask_for() {
    let secret = &documents(KUBERNETES_SECRET)[0];
    let has: BTreeSet<_> = secret["stringData"].as_object().unwrap().keys().cloned().collect();
    for file in KUBERNETES {
        let mut asked = BTreeSet::new();
        for document in documents(file) {
            let mut references = vec![];
            under(&document, "secretKeyRef", &mut references);
            for reference in references {
                assert_eq!(reference["name"], secret["metadata"]["name"], "{file}");
                asked.insert(reference["key"].as_str().unwrap().to_owned());
            }
        }
        assert_eq!(asked, has, "{file}");
    }
    // Filled in by mistake or not at all, no server starts.
    let hmac_key = secret["stringData"]["hmac-key"].as_str().unwrap();
    let config = Config::read(&Flags::new(), |name| (name == "BATON_HMAC_KEY").then(|| hmac_key.to_owned()));
    assert!(config.is_err(), "a server starts with the key {hmac_key}");
}

#[test]
fn every_deployment_has_a_service_that_reaches_its_pods() {
    for file in KUBERNETES {
        let all = documents(file);
        let of_kind =
            |kind: &str| all.iter().find(|one| one["kind"] == kind).unwrap_or_else(|| panic!("{file}: {kind}"));
        let (deployment, service) = (of_kind("Deployment"), of_kind("Service"));
        let labels = deployment.pointer("/spec/template/metadata/labels").unwrap();
        assert_eq!(&service["spec"]["selector"], labels, "{file}");
        let mut ports = vec![];
        under(deployment, "containerPort", &mut ports);
        assert!(ports.contains(&&service["spec"]["ports"][0]["targetPort"]), "{file}");
    }
}

#[test]
fn two_halves_are_told_the_same() {
    let mut pairs = 0;
    for file in CLOUD_RUN.iter().chain(&KUBERNETES) {
        for document in documents(file) {
            let containers = document.pointer("/spec/template/spec/containers").and_then(Value::as_array);
            let Some([one, two]) = containers.map(Vec::as_slice) else { continue };
            let shared = |container: &Value| -> BTreeSet<String> {
                let all = container["env"].as_array().unwrap().iter();
                all.filter(|pair| !OF_ONE_HALF.contains(&pair["name"].as_str().unwrap()))
                    .map(Value::to_string)
                    .collect()
            };
            assert_eq!(shared(one), shared(two), "{file}");
            pairs += 1;
        }
    }
    assert_eq!(pairs, 2);
}

#[test]
fn only_what_runs_sandboxes_has_capabilities_and_the_same_everywhere() {
    let mut lists = vec![];
    for file in KUBERNETES {
        for document in documents(file) {
            let containers = document.pointer("/spec/template/spec/containers").and_then(Value::as_array);
            for container in containers.into_iter().flatten() {
                let context = &container["securityContext"];
                assert_eq!(
                    context["capabilities"]["drop"],
                    serde_json::json!(["ALL"]),
                    "{file}: {}",
                    container["name"]
                );
                assert_ne!(context["privileged"], true, "{file}");
                if container["name"] == "api" {
                    assert!(context["capabilities"].get("add").is_none() && context["runAsNonRoot"] == true, "{file}");
                } else {
                    lists.push(context["capabilities"]["add"].clone());
                }
            }
        }
    }
    assert!(lists.len() == 2 && lists[0] == lists[1], "{lists:?}");
}

/// Seconds of a duration such as `8s`.
fn seconds(text: &str) -> u64 {
    text.strip_suffix('s')
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("{text} is no span in seconds"))
}

#[test]
fn every_server_lets_its_sandboxes_go_before_its_platform_ends_it() {
    // What comes after the drain time: the last call for what did not fit, and the last spans.
    const AFTER: u64 = 2;
    for file in CLOUD_RUN.iter().chain(&KUBERNETES) {
        for document in documents(file) {
            let Some(spec) = document.pointer("/spec/template/spec") else { continue };
            let grace = spec["terminationGracePeriodSeconds"].as_u64().unwrap_or(10);
            for container in spec["containers"].as_array().unwrap() {
                let drain = container["env"].as_array().unwrap().iter().find(|pair| pair["name"] == "BATON_DRAIN");
                let drain = seconds(drain.expect("it says how long")["value"].as_str().unwrap());
                assert!(drain + AFTER <= grace, "{file}: {drain} s of {grace}");
            }
        }
    }
}

#[test]
fn every_shape_asks_the_same_of_the_platform() {
    for file in CLOUD_RUN {
        let service = &documents(file)[0];
        let annotation = |name: &str| service.pointer("/spec/template/metadata/annotations").unwrap()[name].clone();
        assert_eq!(annotation("run.googleapis.com/execution-environment"), "gen2");
        assert_eq!(annotation("run.googleapis.com/cpu-throttling"), "false");
        assert_eq!(annotation("run.googleapis.com/sessionAffinity"), "true");
        let spec = service.pointer("/spec/template/spec").unwrap();
        assert_eq!((&spec["containerConcurrency"], &spec["timeoutSeconds"]), (&1.into(), &3600.into()));
        let ports = spec["containers"].as_array().unwrap().iter().filter(|one| one.get("ports").is_some()).count();
        assert_eq!(ports, 1, "{file}: one container is reached from outside");
        let volumes: BTreeSet<_> =
            spec["volumes"].as_array().unwrap().iter().map(|one| &one["name"]).map(Value::to_string).collect();
        for container in spec["containers"].as_array().unwrap() {
            for mount in container["volumeMounts"].as_array().unwrap() {
                assert!(
                    volumes.contains(&mount["name"].to_string()),
                    "{file} mounts {}, which is no volume",
                    mount["name"]
                );
            }
        }
        if let Some(text) = annotation("run.googleapis.com/container-dependencies").as_str() {
            assert!(serde_json::from_str::<Value>(text).unwrap().is_object());
        }
    }
    let script = read("manifests/bucket");
    let rules = json("manifests/lifecycle.json");
    for rule in rules["rule"].as_array().unwrap() {
        let (action, condition) = (&rule["action"]["type"], &rule["condition"]);
        // What is deleted by age alone must be nothing that a sandbox needs.
        let is_harmless = action == "AbortIncompleteMultipartUpload"
            || (action == "Delete" && condition["matchesPrefix"] == serde_json::json!(["probes/"]));
        assert!(is_harmless && condition["age"] == 1, "{rule}");
    }
    for word in [
        "--public-access-prevention",
        "--clear-soft-delete",
        "--no-versioning",
        "roles/storage.objectUser",
        "lifecycle.json",
    ] {
        assert!(script.contains(word), "manifests/bucket lacks {word}");
    }
}

/// What is different about a service with a mount is the mount.
#[test]
fn a_mounted_bucket_is_the_one_that_is_named_and_holds_no_locks() {
    let (plain, mut mounted) = (documents("manifests/cloud-run.yaml"), documents("manifests/cloud-run-mounted.yaml"));
    let spec = mounted[0].pointer_mut("/spec/template/spec").unwrap();
    let take = |list: &mut Value, is_wanted: &dyn Fn(&Value) -> bool| -> Vec<Value> {
        let (taken, left) = list.as_array().unwrap().iter().cloned().partition(is_wanted);
        *list = Value::Array(left);
        taken
    };
    let volume = take(&mut spec["volumes"], &|one| one.get("csi").is_some()).remove(0);
    let container = &mut spec["containers"][0];
    let mount = take(&mut container["volumeMounts"], &|one| one["name"] == volume["name"]).remove(0);
    let paths = take(&mut container["env"], &|one| one["name"].as_str().unwrap().ends_with("_MOUNT_PATH"));
    let names: Vec<_> = paths.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["SANDBOX_CHECKPOINT_MOUNT_PATH", "FILESYSTEM_SNAPSHOT_MOUNT_PATH"]);
    assert!(paths.iter().all(|one| one["value"] == mount["mountPath"]), "{paths:?} and {mount}");
    let attributes = &volume["csi"]["volumeAttributes"];
    for name in ["SANDBOX_CHECKPOINT_BUCKET", "FILESYSTEM_SNAPSHOT_BUCKET"] {
        let set = container["env"].as_array().unwrap().iter().find(|one| one["name"] == name).unwrap();
        assert_eq!(set["value"], attributes["bucketName"], "{name}");
    }
    // The tests mount buckets with these very options.
    let fixture = read("tests/storage/gcsfuse_mount.rs");
    for option in attributes["mountOptions"].as_str().unwrap().split(',') {
        assert!(fixture.contains(&format!("\"--{option}\"")), "{option} was never tried");
    }
    assert_ne!(volume["csi"]["readOnly"], true);
    assert_eq!(mounted, plain, "nothing else is different");
}

/// Everything the server can ever show, once.
fn page() -> String {
    let metrics = Metrics::default();
    let span = Duration::from_millis(1);
    let mut shown = metrics.sandbox();
    shown.set(&ExecEnd::Zero);
    metrics.sandbox_left(&ExecEnd::Zero);
    metrics.acted(&ExecEnd::Zero, ActionOutcome::Done, span);
    metrics.renewed(span);
    metrics.moved_here(span);
    metrics.store_called(StoreVerb::Poll, StoreAnswer::Good, span);
    metrics.store_moved(Direction::In, 1);
    metrics.exec_started();
    metrics.warm_missed(Missed::Empty);
    metrics.exec_ended(ExecEnd::Zero);
    metrics.exec_moved(ExecPipe::Stdin, 1);
    metrics.connection_ended(ConnectionEnd::Closed);
    metrics.page(1, 1)
}

#[test]
fn every_query_of_the_dashboard_names_a_figure_that_exists() {
    let page = page();
    let there: BTreeSet<_> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(['{', ' ']).next().unwrap().to_owned())
        .collect();
    let dashboard = json("manifests/grafana.json");
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            let names: Vec<_> = words.filter(|word| word.starts_with("baton_")).collect();
            assert!(!names.is_empty(), "{query} asks for nothing");
            for name in names {
                assert!(there.contains(name), "{query} asks for {name}, which the server does not show");
                asked.insert(name.trim_end_matches("_bucket").trim_end_matches("_count").to_owned());
            }
        }
    }
    for name in there {
        let base = ["_bucket", "_count", "_sum"].iter().fold(name.as_str(), |name, end| name.trim_end_matches(end));
        assert!(asked.contains(base), "{base} is on no panel");
    }
}

/// Operations per hour of one held sandbox, as the page on deploying counts them, and what they cost.
#[test]
fn the_costs_on_the_page_follow_from_the_times_of_the_lease() {
    const PER_WRITE: f64 = 0.005 / 1000.0;
    const PER_READ: f64 = 0.0004 / 1000.0;
    let page = read("docs/deploy.md");
    let row = |name: &str, times: LeaseTimes| {
        // A renewal comes up to a fifth later than it might, on average a tenth.
        let writes = 3600.0 / (times.renew.as_secs_f64() * 1.1);
        let reads = 3600.0 / times.poll.lock.as_secs_f64() + 3600.0 / times.poll.metadata.as_secs_f64();
        let hour = writes * PER_WRITE + reads * PER_READ;
        format!("| {name} | {writes:.0} | {reads:.0} | ${hour:.4} | ${:.2} |", hour * 730.0)
    };
    let slow = Duration::from_secs(15);
    let slower = LeaseTimes { renew: slow, hold: slow * 3, takeover: slow * 5, ..LeaseTimes::DEFAULT };
    slower.check().unwrap();
    for line in [row("`BATON_RENEW=5s` (default)", LeaseTimes::DEFAULT), row("`BATON_RENEW=15s`", slower)] {
        assert!(page.contains(&line), "docs/deploy.md lacks\n{line}");
    }
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    // A page of a listing has 998 entries, and a sandbox is a lock and its metadata.
    let sweeps = |instances: f64, stored: f64, every: f64| {
        instances * (stored / 499.0).ceil() * 3600.0 / every * PER_WRITE * 730.0
    };
    let instance = |cpus: f64, gib: f64| 3600.0 * (cpus * 0.000_018 + gib * 0.000_002);
    for words in [
        format!("${:.2} per month of running", sweeps(1.0, 1.0, 60.0)),
        format!("are ${:.0} a month, with `BATON_SWEEP=10m` ${:.0}", sweeps(20.0, 1e4, 60.0), sweeps(20.0, 1e4, 600.0)),
        format!("always allocated, are ${:.2} per hour", instance(2.0, 2.0)),
        format!("as two containers: ${:.2}", instance(3.0, 2.5)),
    ] {
        assert!(page.contains(&words), "docs/deploy.md lacks: {words}");
    }
}
