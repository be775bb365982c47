//! The table, and the settings that result from given variables and flags.

use super::*;

fn env(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
    let map: BTreeMap<String, String> = pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    move |name| map.get(name).cloned()
}

fn read(pairs: &[(&str, &str)]) -> Config {
    Config::from_env(env(pairs)).unwrap()
}

fn complaint(pairs: &[(&str, &str)]) -> String {
    Config::from_env(env(pairs)).unwrap_err().to_string()
}

#[test]
fn every_variable_of_the_table_is_read_exactly_once() {
    let config = read(&[]);
    let read: Vec<_> = config.settings().iter().map(|setting| setting.name).collect();
    assert_eq!(read, all().map(|variable| variable.name).collect::<Vec<_>>());
}

#[test]
fn names_and_flags_are_unique_and_meanings_are_one_line() {
    let mut names: Vec<_> = all().map(|variable| variable.name.to_owned()).collect();
    names.extend(all().filter_map(Variable::flag));
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(all().all(|variable| !variable.meaning.contains(['\n', '|'])));
}

#[test]
fn a_flag_is_called_like_its_variable_and_what_the_platform_sets_has_none() {
    let flag = |variable: Variable| variable.flag();
    assert_eq!(flag(MAX_SANDBOXES).as_deref(), Some("max-sandboxes"));
    assert_eq!(flag(SANDBOX_LOCK_BUCKET).as_deref(), Some("sandbox-lock-bucket"));
    assert_eq!((flag(PORT).as_deref(), flag(K_SERVICE)), (Some("port"), None));
}

#[test]
fn nothing_set_gives_the_defaults() {
    let config = read(&[]);
    assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(config.lease, LeaseTimes::DEFAULT);
    assert_eq!((config.drain, config.sweep), (Duration::from_secs(8), Some(Duration::from_secs(60))));
    assert_eq!((config.retention, config.checkpoint_every), (None, None));
    assert_eq!(config.rootfs_cache, 10 << 30);
    assert_eq!(config.storage, StorageSettings::default());
    assert_eq!(config.state_dir, PathBuf::from("/run/baton"));
    assert!(config.settings().iter().all(|setting| setting.source == SettingSource::Default));
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let config = read(&[("SANDBOX_METADATA_BUCKET", ""), ("BATON_LISTEN", " "), ("PORT", "")]);
    assert_eq!(config.storage.metadata_bucket, None);
    assert_eq!(config.listen.to_string(), "127.0.0.1:8080");
}

#[test]
fn a_port_listens_on_all_addresses_whatever_listen_says() {
    assert_eq!(read(&[("PORT", "9090"), ("BATON_LISTEN", "127.0.0.1:1")]).listen.to_string(), "0.0.0.0:9090");
}

#[test]
fn a_flag_wins_over_a_variable_and_an_empty_flag_unsets_it() {
    let flags = Flags::from([("BATON_LISTEN", "[::1]:1".to_owned()), ("SANDBOX_LOCK_BUCKET", String::new())]);
    let variables = env(&[("BATON_LISTEN", "1.2.3.4:5"), ("SANDBOX_LOCK_BUCKET", "locks"), ("BATON_DRAIN", "3s")]);
    let config = Config::read(&flags, variables).unwrap();
    assert_eq!((config.listen.to_string().as_str(), &config.storage.lock_bucket), ("[::1]:1", &None));
    let source = |name| config.settings().iter().find(|setting| setting.name == name).map(|setting| setting.source);
    assert_eq!(source("BATON_LISTEN"), Some(SettingSource::Flag));
    assert_eq!(source("BATON_DRAIN"), Some(SettingSource::Variable));
    assert_eq!(source("SANDBOX_LOCK_BUCKET"), Some(SettingSource::Default));
}

#[test]
fn every_storage_variable_arrives_in_its_own_field() {
    let names = [
        "SANDBOX_METADATA_BUCKET",
        "SANDBOX_METADATA_MOUNT_PATH",
        "SANDBOX_LOCK_BUCKET",
        "SANDBOX_CHECKPOINT_BUCKET",
        "SANDBOX_CHECKPOINT_MOUNT_PATH",
        "FILESYSTEM_SNAPSHOT_BUCKET",
        "FILESYSTEM_SNAPSHOT_MOUNT_PATH",
        "CHECKPOINT_AND_RESTORE_PATH",
    ];
    let pairs = names.map(|name| (name, name));
    let s = read(&pairs).storage;
    let path = |path: Option<PathBuf>| path.and_then(|path| path.to_str().map(str::to_owned));
    let fields = [
        s.metadata_bucket,
        path(s.metadata_mount),
        s.lock_bucket,
        s.checkpoint_bucket,
        path(s.checkpoint_mount),
        s.snapshot_bucket,
        path(s.snapshot_mount),
        path(s.all_mount),
    ];
    assert_eq!(fields, names.map(|name| Some(name.to_owned())));
}

#[test]
fn a_bad_value_is_named_with_what_was_expected() {
    assert_eq!(
        complaint(&[("BATON_HOLD", "soon")]),
        "BATON_HOLD is 'soon', but it must be a duration such as 500ms, 15s or 2m"
    );
    let flags = Flags::from([("BATON_MAX_SANDBOXES", "0".to_owned())]);
    let error = Config::read(&flags, env(&[])).unwrap_err().to_string();
    assert_eq!(error, "--max-sandboxes is '0', but it must be a whole number above zero");
}

#[test]
fn every_kind_that_can_be_wrong_is_refused_with_its_own_sentence() {
    for variable in all() {
        let wrong = match variable.kind {
            ValueKind::Text
            | ValueKind::Platform
            | ValueKind::Secret
            | ValueKind::ApiKeys
            | ValueKind::Keys
            | ValueKind::Names
            | ValueKind::Path => continue,
            ValueKind::Digests => "/bin/sh",
            ValueKind::Port => "70000",
            ValueKind::Address => "localhost",
            ValueKind::AddressOrOff => "here",
            ValueKind::DomainOrOff => "*.example.org",
            ValueKind::Url => "ftp://x",
            ValueKind::YesNo => "perhaps",
            ValueKind::Count | ValueKind::CountOrNone | ValueKind::Size | ValueKind::Rate => "-3",
            ValueKind::Factor => "0",
            ValueKind::Span | ValueKind::SpanOrOff => "later",
            ValueKind::Limits => "memory=lots",
            ValueKind::Egress => "https://example.org",
            ValueKind::EgressLimits => "connections=lots",
            ValueKind::Addresses => "10.0.0.0/8",
            ValueKind::Quotas => "sandboxes=all",
            ValueKind::PlainWords => "documentation",
            ValueKind::Requirement => "perhaps",
        };
        let sentence = complaint(&[(variable.name, wrong)]);
        assert!(sentence.starts_with(&format!("{} is '{wrong}', but", variable.name)), "{sentence}");
        assert!(sentence.ends_with(variable.kind.expects()), "{sentence}");
    }
}

#[test]
fn secrets_are_covered_wherever_the_value_is_printed() {
    let config =
        read(&[("BATON_API_KEYS", "alpha,beta"), ("BATON_ADMIN_KEY", "gamma"), ("BATON_HMAC_KEY", &"delta".repeat(7))]);
    assert_eq!(config.api_keys.iter().map(|key| key.secret.reveal().as_str()).collect::<Vec<_>>(), ["alpha", "beta"]);
    let printed = format!("{config:?}");
    for secret in ["alpha", "beta", "gamma", "delta"] {
        assert!(!printed.contains(secret), "{printed}");
    }
}

#[test]
fn keys_that_could_be_guessed_are_refused_and_not_shown() {
    let (long, short) = ("k".repeat(32), "s".repeat(31));
    let keys = read(&[("BATON_HMAC_KEY", &format!("{long}, {long}"))]).hmac_keys;
    assert!(keys.len() == 2 && keys.iter().all(|key| key.reveal() == &long));
    for wrong in [short.clone(), format!("{long},{short}"), ",".to_owned()] {
        let sentence = complaint(&[("BATON_HMAC_KEY", &wrong)]);
        assert_eq!(
            sentence,
            "BATON_HMAC_KEY is '(redacted)', but it must be keys of at least 32 bytes each, separated by commas"
        );
    }
}

#[test]
fn a_bucket_without_a_key_is_a_warning_and_a_directory_is_none() {
    let warned = |variables: &[(&str, &str)]| {
        let warnings = read(variables).warnings();
        assert!(warnings.iter().all(|text| text.contains("BATON_HMAC_KEY")), "{warnings:?}");
        warnings.len() == 1
    };
    let (key, all) =
        (("BATON_HMAC_KEY", "a-key-of-the-tests-with-32-bytes-or-more"), ("CHECKPOINT_AND_RESTORE_PATH", "/d"));
    for bucket in
        ["SANDBOX_METADATA_BUCKET", "SANDBOX_LOCK_BUCKET", "SANDBOX_CHECKPOINT_BUCKET", "FILESYSTEM_SNAPSHOT_BUCKET"]
    {
        assert!(warned(&[(bucket, "b")]), "{bucket}");
        assert!(!warned(&[(bucket, "b"), key]), "{bucket}");
    }
    let mounted = ("SANDBOX_CHECKPOINT_MOUNT_PATH", "/mnt");
    assert!(warned(&[("SANDBOX_CHECKPOINT_BUCKET", "b"), mounted]), "a mount of that bucket");
    assert!(
        !warned(&[]) && !warned(&[all]) && !warned(&[mounted]) && !warned(&[("SANDBOX_CHECKPOINT_BUCKET", "b"), all])
    );
}

#[test]
fn directories_follow_the_users_own() {
    let config = read(&[("HOME", "/home/ann"), ("XDG_CACHE_HOME", "/scratch")]);
    assert_eq!(config.state_dir, PathBuf::from("/home/ann/.local/state/baton"));
    assert_eq!(config.cache_dir, PathBuf::from("/scratch/baton"));
    assert_eq!(read(&[("HOME", "/")]).cache_dir, PathBuf::from("/var/cache/baton"));
    let shown = config.settings().iter().find(|setting| setting.name == "BATON_STATE_DIR").unwrap();
    assert_eq!(shown.value.as_deref(), Some("/home/ann/.local/state/baton"));
}

#[test]
fn the_time_scale_multiplies_every_time_of_the_lease_and_keeps_it_safe() {
    let times = read(&[("BATON_TIME_SCALE", "0.1"), ("BATON_TAKEOVER", "60s")]).lease;
    assert_eq!((times.renew, times.hold), (Duration::from_millis(500), Duration::from_millis(1500)));
    assert_eq!((times.takeover, times.confirm), (Duration::from_secs(6), Duration::from_millis(200)));
    assert_eq!((times.waiter, times.handoff_wait), (Duration::from_secs(6), Duration::from_secs(12)));
    times.check().unwrap();
}

#[test]
fn a_time_scale_is_refused_on_cloud_run() {
    assert!(complaint(&[("K_SERVICE", "baton"), ("BATON_TIME_SCALE", "0.5")]).contains("refused on Cloud Run"));
    assert!(read(&[("K_SERVICE", "baton")]).on_cloud_run);
}

#[test]
fn lease_times_under_which_two_copies_could_run_are_refused() {
    let sentence = complaint(&[("BATON_TAKEOVER", "20s")]);
    assert!(sentence.starts_with("BATON_TAKEOVER is 20s, but with BATON_HOLD at 15s"), "{sentence}");
    let sentence = complaint(&[("BATON_RENEW", "10s")]);
    assert!(sentence.starts_with("BATON_HOLD is 15s, but with BATON_RENEW at 10s"), "{sentence}");
}

#[test]
fn the_variable_of_googles_clients_names_the_emulator_unless_our_own_does() {
    let (ours, theirs) = ("BATON_GCS_ENDPOINT", "STORAGE_EMULATOR_HOST");
    for (text, endpoint) in [
        ("http://127.0.0.1:9000/", "http://127.0.0.1:9000"),
        ("localhost:9000", "http://localhost:9000"),
        ("https://emulator", "https://emulator"),
    ] {
        let config = read(&[(theirs, text)]);
        assert_eq!(config.storage.gcs_endpoint.as_deref(), Some(endpoint));
        assert!(config.warnings().is_empty());
    }
    assert!(complaint(&[(theirs, "ftp://x")]).contains(theirs));
    let config = read(&[(theirs, "localhost:9000"), (ours, "http://127.0.0.1:4443")]);
    assert_eq!(config.storage.gcs_endpoint.as_deref(), Some("http://127.0.0.1:4443"));
    assert!(config.warnings()[0].contains(theirs), "{:?}", config.warnings());
}
