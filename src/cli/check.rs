//! `baton config --check`: tests every configured store the way it will be used.

use std::{sync::Arc, time::Duration};

use crate::{
    clock::{SharedClock, SystemClock},
    config::{Config, variables::LIMITS},
    runtime::Shares,
    storage::{
        layout::Artifact,
        stores::{Need, StorageRefusal, StoreProbe, Stores},
    },
};

/// The timeout of the whole check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns a line per store, and whether all of them work.
pub async fn check(config: &Config) -> (String, bool) {
    let clock: SharedClock = Arc::new(SystemClock);
    let stores = Stores::open(&config.storage, &clock);
    let tried =
        clock.timeout(CHECK_TIMEOUT, async { (stores.probe().await, stores.check(Need::Checkpoint).await) }).await;
    match tried {
        Ok((probes, verdict)) => report(&probes, verdict),
        Err(elapsed) => (format!("storage: {elapsed}\n"), false),
    }
}

fn report(probes: &[StoreProbe], verdict: Result<(), StorageRefusal>) -> (String, bool) {
    let mut text: String = probes.iter().map(line).collect();
    let failed = probes.iter().filter(|probe| probe.result.is_err()).count();
    let mut well = failed == 0;
    match verdict {
        Ok(()) if !well => {
            text.push_str(&format!("{failed} of {} stores do not work: what needs them fails.\n", probes.len()));
        }
        Ok(()) => text.push_str("Sandboxes can outlive this instance.\n"),
        Err(StorageRefusal::NoCheckpoints) if probes.is_empty() => {
            text.push_str("No storage is configured: every sandbox ends with its instance.\n");
        }
        Err(refusal) => {
            well = false;
            text.push_str(&format!("{refusal}\n"));
        }
    }
    (text, well)
}

fn line(probe: &StoreProbe) -> String {
    let what = match probe.artifact {
        Artifact::Lock => "locks",
        Artifact::Metadata => "metadata",
        Artifact::Checkpoints => "checkpoints",
        Artifact::Snapshots => "snapshots",
    };
    let place = match (&probe.bucket, probe.is_mounted) {
        (Some(bucket), true) => format!("a mount of bucket {bucket}"),
        (Some(bucket), false) => format!("bucket {bucket}"),
        (None, _) => "a directory".to_owned(),
    };
    match &probe.result {
        Ok(()) => format!("{what:12} {place}: works\n"),
        Err(error) => format!("{what:12} {place}: {error}\n"),
    }
}

/// Returns a line about how limits are enforced on this machine, and whether all configured limits are.
pub fn limits(config: &Config, cgroups: Result<Shares, String>) -> (String, bool) {
    let (how, cpus) = match cgroups {
        Ok(Shares { version, cpus }) => (format!("cgroup {version}"), cpus),
        Err(why) => (why, false),
    };
    let wanted = config.limits.ceiling.cpus.is_some();
    let what = match (cpus, wanted) {
        (true, _) => "memory, cpus, pids, disk and files can be limited".to_owned(),
        (false, true) => format!("memory, pids, disk and files can be limited, but cpus, which {LIMITS} names, cannot"),
        (false, false) => "memory, pids, disk and files can be limited, cpus cannot".to_owned(),
    };
    (format!("limits       {how}: {what}\n"), cpus || !wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Config {
        let lookup =
            |name: &str| variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned());
        Config::from_env(lookup).unwrap()
    }

    #[tokio::test]
    async fn a_directory_works_and_nothing_is_left_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(&[("CHECKPOINT_AND_RESTORE_PATH", directory.path().to_str().unwrap())]);
        let (text, well) = check(&config).await;
        assert!(well, "{text}");
        assert_eq!(text.lines().filter(|line| line.ends_with("works")).count(), 4, "{text}");
        assert!(
            !directory.path().join("probes").exists()
                || std::fs::read_dir(directory.path().join("probes")).unwrap().next().is_none()
        );
    }

    #[test]
    fn limits_that_this_machine_cannot_hold_are_not_well() {
        let shares = |cpus| Ok(Shares { version: "v2".to_owned(), cpus });
        let (plain, wanted) = (config(&[]), config(&[("BATON_LIMITS", "cpus=1,memory=1GiB")]));
        let (text, well) = limits(&wanted, shares(true));
        assert_eq!(text, "limits       cgroup v2: memory, cpus, pids, disk and files can be limited\n");
        assert!(well && limits(&plain, shares(false)).1 && limits(&plain, Err("none".to_owned())).1);
        let (text, well) = limits(&wanted, Err("this machine has no cgroups".to_owned()));
        assert!(!well && text.contains("this machine has no cgroups: memory") && text.ends_with("names, cannot\n"));
    }

    #[tokio::test]
    async fn without_storage_it_says_what_that_means() {
        let (text, well) = check(&config(&[])).await;
        assert_eq!((text.as_str(), well), ("No storage is configured: every sandbox ends with its instance.\n", true));
    }

    #[tokio::test]
    async fn half_a_configuration_and_a_bucket_out_of_reach_are_not_well() {
        let (text, well) = check(&config(&[("SANDBOX_CHECKPOINT_MOUNT_PATH", "/dev/null/x")])).await;
        assert!(!well, "{text}");
        let unreachable = [
            ("SANDBOX_METADATA_BUCKET", "b"),
            ("SANDBOX_CHECKPOINT_BUCKET", "b"),
            ("BATON_GCS_ENDPOINT", "http://127.0.0.1:1"),
        ];
        let (text, well) = check(&config(&unreachable)).await;
        assert!(!well && text.contains("locks        bucket b: storage"), "{text}");
        assert!(text.ends_with("3 of 3 stores do not work: what needs them fails.\n"), "{text}");
    }
}
