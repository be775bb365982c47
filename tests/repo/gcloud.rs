//! What is typed at `gcloud`: `manifests/bucket`, run against a stand-in that remembers what exists, and the
//! commands of docs/deploy.md. Each is one of a few whose flags were read in the reference of the tool.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
};

use crate::repo_files::{read, root};

/// Commands and the flags of theirs that are used.
const KNOWN: &[(&str, &[&str])] = &[
    ("auth login", &[]),
    ("auth configure-docker", &[]),
    ("auth application-default login", &["--impersonate-service-account"]),
    ("projects create", &[]),
    ("billing projects link", &["--billing-account"]),
    ("config set", &[]),
    ("services enable", &[]),
    ("builds submit", &["--tag", "--timeout"]),
    ("iam service-accounts describe", &[]),
    ("iam service-accounts create", &["--display-name"]),
    ("iam service-accounts add-iam-policy-binding", &["--member", "--role"]),
    ("iam service-accounts delete", &[]),
    ("container clusters create", &["--region", "--num-nodes", "--workload-pool"]),
    ("container clusters get-credentials", &["--region"]),
    ("storage buckets describe", &[]),
    (
        "storage buckets create",
        &[
            "--location",
            "--default-storage-class",
            "--uniform-bucket-level-access",
            "--public-access-prevention",
            "--soft-delete-duration",
        ],
    ),
    ("storage buckets update", &["--no-versioning", "--clear-soft-delete", "--lifecycle-file"]),
    ("storage buckets add-iam-policy-binding", &["--member", "--role"]),
    ("storage rm", &["--recursive"]),
    ("secrets describe", &[]),
    ("secrets delete", &[]),
    ("secrets create", &["--replication-policy"]),
    ("secrets versions add", &["--data-file"]),
    ("secrets versions access", &["--secret"]),
    ("secrets add-iam-policy-binding", &["--member", "--role"]),
    ("artifacts repositories create", &["--repository-format", "--location"]),
    ("artifacts repositories delete", &["--location"]),
    ("run services replace", &["--region"]),
    ("run services add-iam-policy-binding", &["--region", "--member", "--role"]),
    ("run services describe", &["--region", "--format"]),
    ("run services update-traffic", &["--region", "--to-revisions", "--to-latest"]),
    ("run services delete", &["--region"]),
    ("run revisions list", &["--region", "--service"]),
    ("storage cp", &[]),
    ("storage ls", &["--long"]),
];

/// Remembers in a directory what was made, and writes down what it was asked.
const STAND_IN: &str = r#"#!/bin/bash
set -euo pipefail
printf '%s\t' "$@" >>"$PLACE/asked"; echo >>"$PLACE/asked"
shift 3
kind=''
while (($#)); do
  case $1 in
    describe | create)
      made=$PLACE/made/$kind$(printf '%s' "${2%%@*}" | tr -c 'a-z0-9-' _)
      if [[ $1 == describe ]]; then [[ -e $made ]]; else [[ ! -e $made ]] && touch "$made"; fi
      exit
      ;;
    add) [[ $kind != secrets-versions- ]] || cat >"$PLACE/secret-$2" ;;
  esac
  kind+=$1-
  shift
done
"#;

/// What is wrong with a command of gcloud, without its own name.
fn fault(words: &[&str]) -> Option<String> {
    let words = match words {
        ["--project", _, "--quiet", words @ ..] => words,
        words => words,
    };
    let line = words.join(" ");
    let Some((_, flags)) = KNOWN.iter().find(|(command, _)| line.starts_with(command)) else {
        return Some(format!("{line}: no command that is known"));
    };
    let given = words.iter().filter(|word| word.starts_with("--")).map(|word| word.split('=').next().unwrap());
    let unknown = given.into_iter().find(|flag| !flags.contains(flag));
    unknown.map(|flag| format!("{line}: {flag} is not known"))
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("made")).unwrap();
        let stand_in = place.path().join("gcloud");
        fs::write(&stand_in, STAND_IN).unwrap();
        fs::set_permissions(&stand_in, fs::Permissions::from_mode(0o755)).unwrap();
        Self(place)
    }

    /// Runs the script; what it asked for, word by word.
    fn run(&self, arguments: &[&str]) -> (bool, Vec<Vec<String>>) {
        let asked = self.0.path().join("asked");
        fs::write(&asked, "").unwrap();
        let mut script = Command::new(root().join("manifests/bucket"));
        script.args(arguments).env_clear().env("PLACE", self.0.path()).stdin(Stdio::null());
        script.env("PATH", format!("{}:/usr/bin:/bin", self.0.path().display()));
        let done = script.output().unwrap();
        let asked = fs::read_to_string(asked).unwrap();
        let words = |line: &str| line.trim_end_matches('\t').split('\t').map(str::to_owned).collect();
        (done.status.success(), asked.lines().map(words).collect())
    }
}

#[test]
fn the_script_makes_what_a_service_needs_once_and_gives_no_more_rights_than_those() {
    let place = Place::new();
    let (good, asked) = place.run(&["my-project", "europe-west1"]);
    assert!(good, "{asked:#?}");
    for words in &asked {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        assert_eq!(fault(&words), None);
        assert_eq!(&words[..2], ["--project", "my-project"], "every command names the project");
    }
    let has = |words: &[&str]| asked.iter().any(|line| words.iter().all(|word| line.iter().any(|one| one == word)));
    for bucket in ["gs://my-project-baton", "gs://my-project-baton-checkpoints"] {
        assert!(has(&[
            "create",
            bucket,
            "--uniform-bucket-level-access",
            "--public-access-prevention",
            "europe-west1"
        ]));
        assert!(has(&["update", bucket, "--no-versioning", "--clear-soft-delete", "--lifecycle-file"]));
    }
    let account = "serviceAccount:baton@my-project.iam.gserviceaccount.com";
    let grants = asked.iter().filter(|line| line.iter().any(|word| word == "add-iam-policy-binding"));
    let after = |line: &[String], flag: &str| line[line.iter().position(|word| word == flag).unwrap() + 1].clone();
    let mut roles = BTreeSet::new();
    for grant in grants {
        assert_eq!(after(grant, "--member"), account);
        roles.insert((after(grant, "add-iam-policy-binding"), after(grant, "--role")));
    }
    let role = |on: &str, role: &str| (on.to_owned(), role.to_owned());
    let expected = [
        role("baton-admin-key", "roles/secretmanager.secretAccessor"),
        role("baton-api-keys", "roles/secretmanager.secretAccessor"),
        role("baton-hmac-key", "roles/secretmanager.secretAccessor"),
        role("gs://my-project-baton", "roles/storage.objectUser"),
        role("gs://my-project-baton-checkpoints", "roles/storage.objectUser"),
    ];
    assert_eq!(roles, expected.into());
    let secret = |name: &str| fs::read_to_string(place.0.path().join(format!("secret-{name}"))).unwrap();
    let (key, hmac_key) = (secret("baton-api-keys"), secret("baton-hmac-key"));
    assert!(key.len() >= 24 && key.chars().all(|c| c.is_ascii_alphanumeric()), "a key that fits a header");
    assert!(hmac_key.len() >= 32 && hmac_key != key, "a key that the server takes");

    let (good, again) = place.run(&["my-project", "europe-west1"]);
    assert!(good && !again.iter().flatten().any(|word| word == "create"), "safe to repeat: {again:#?}");
    assert_eq!((secret("baton-api-keys"), secret("baton-hmac-key")), (key, hmac_key), "the keys stay");
    let (good, nothing) = place.run(&["my-project"]);
    assert!(!good && nothing.is_empty(), "without a region nothing is done");
}

#[test]
fn every_command_of_the_pages_is_known_with_its_flags() {
    let mut count = 0;
    for page in ["docs/deploy.md", "docs/operate.md", "docs/storage.md", "manifests/README.md"] {
        let text = read(page);
        for start in text.match_indices("gcloud ").map(|(at, _)| at + "gcloud ".len()) {
            let command = text[start..].split(['\n', '`', '|']).next().unwrap();
            let words: Vec<_> = command.split_whitespace().collect();
            assert_eq!(fault(&words), None, "{page}");
            count += 1;
        }
    }
    assert!(count >= 4, "only {count} commands were found");
}

#[test]
fn a_slip_in_a_command_is_found() {
    let fault = |line: &str| fault(&line.split(' ').collect::<Vec<_>>());
    assert!(
        fault("storage buckets update gs://b --soft-delete-off").unwrap().contains("--soft-delete-off is not known")
    );
    assert!(fault("storage bucket update gs://b").unwrap().contains("no command"));
    assert_eq!(fault("--project p --quiet secrets describe baton-api-keys"), None);
}
