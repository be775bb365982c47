//! Every setting of the server, read once into one immutable value. No other module reads the environment.
//!
//! A flag takes precedence over a variable, and a variable over the default; an empty value counts as
//! unset. Nothing here does I/O: a missing bucket or file is only noticed when it is needed.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use baton_protocol::{id::Sha256Name, limits::Bounds, metadata::PlainWords};
use serde::Serialize;

use crate::telemetry::Redacted;

mod document;
mod keys;
mod lease_times;
mod parse;
mod quotas;
mod table;

pub use self::lease_times::{LeaseTimes, PollIntervals};
pub use document::document;
pub use keys::{ApiKey, api_keys};
pub use parse::Rate;
pub use quotas::{Quota, Quotas};
pub use table::{Preset, SECTIONS, Section, ValueKind, Variable, all, find};

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SettingSource {
    Default,
    Variable,
    Flag,
}

/// One effective setting; secrets are already redacted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    pub name: &'static str,
    /// `None` if unset.
    pub value: Option<String>,
    pub source: SettingSource,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{name} is '{value}', but it must be {expects}")]
    Bad { name: String, value: String, expects: &'static str },
    #[error("{0}")]
    Conflict(String),
}

/// The storage variables as given; `storage` decides what they mean in combination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageVariables {
    pub metadata_bucket: Option<String>,
    pub metadata_mount: Option<String>,
    pub lock_bucket: Option<String>,
    pub checkpoint_bucket: Option<String>,
    pub checkpoint_mount: Option<String>,
    pub snapshot_bucket: Option<String>,
    pub snapshot_mount: Option<String>,
    pub all_mount: Option<String>,
}

/// The bounds for clients' connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub keep_alive: Duration,
    pub per_peer: usize,
    pub inbound_memory: u64,
}

#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    /// `None` if disabled.
    pub admin_listen: Option<SocketAddr>,
    pub api_keys: Vec<ApiKey>,
    pub admin_key: Option<Redacted<String>>,
    pub plain: PlainWords,
    pub is_token_optional: bool,
    pub origins: Vec<String>,
    /// `None` means no limit.
    pub rate_limit: Option<Rate>,
    pub trusted_proxies: usize,
    /// Host names that a request may use for the server; if empty, those that fit the address.
    pub hosts: Vec<String>,
    pub connections: ConnectionLimits,

    pub max_sandboxes: usize,
    pub warm: usize,
    pub limits: Bounds,
    pub quotas: Quotas,
    pub detach_grace: Duration,
    pub drain: Duration,

    pub state_dir: PathBuf,
    pub socket_dir: PathBuf,
    /// `None`: the user of the reconciler.
    pub api_user: Option<u32>,
    pub cache_dir: PathBuf,
    /// `None`: search for it, as described in the table.
    pub runsc: Option<PathBuf>,
    pub rootfs: Option<PathBuf>,
    pub agent: Option<PathBuf>,
    /// Empty: all features of this machine.
    pub cpu_features: Vec<String>,
    pub rootfs_cache: u64,
    pub archive_size: u64,
    pub archive_entries: u32,
    pub archive_depth: u32,
    /// `None`: those known to this build.
    pub runtimes: Option<Vec<Sha256Name>>,
    pub store_runtime: bool,
    pub log: String,
    pub on_cloud_run: bool,
    pub project: Option<String>,

    pub storage: StorageVariables,
    pub gcs_endpoint: Option<String>,
    /// `None`: traces are not exported.
    pub otlp_endpoint: Option<String>,
    pub otel_service: String,
    /// The first key signs, and every key verifies. Empty: nothing is signed.
    pub hmac_keys: Vec<Redacted<String>>,
    pub keep_checkpoints: u32,
    /// `None` disables, here and below.
    pub checkpoint_every: Option<Duration>,
    pub sweep: Option<Duration>,
    pub retention: Option<Duration>,

    pub lease: LeaseTimes,

    settings: Vec<Setting>,
}

/// The warning about a bucket without signatures.
const UNSIGNED: &str = "BATON_HMAC_KEY is not set: whoever can write objects to the bucket decides what sandboxes are \
    restored from, and can give one sandbox the memory and files of another; set it to a secret of at least 32 bytes, \
    the same for every instance";

impl StorageVariables {
    /// Whether anything is stored in Cloud Storage, directly or through a mount.
    fn uses_a_bucket(&self) -> bool {
        // With `CHECKPOINT_AND_RESTORE_PATH` alone it is unknown whether writes go to the bucket.
        let is_used = |bucket: &Option<String>, mount: &Option<String>| {
            bucket.is_some() && (mount.is_some() || self.all_mount.is_none())
        };
        self.metadata_bucket.is_some()
            || self.lock_bucket.is_some()
            || is_used(&self.checkpoint_bucket, &self.checkpoint_mount)
            || is_used(&self.snapshot_bucket, &self.snapshot_mount)
    }
}
/// One client's message must fit into the memory that all clients share.
const LONGEST_MESSAGE: u64 = 16 << 20;
const OPEN_TO_ALL: &str = "BATON_API_KEYS is not set and the server does not listen on loopback: everyone who reaches it may create sandboxes";

/// Flags by the name of their variable.
pub type Flags = BTreeMap<&'static str, String>;

/// The environment of this process; the only code that reads it.
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

impl Config {
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        Self::read(&Flags::new(), lookup)
    }

    pub fn read(flags: &Flags, lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let mut from = Reader { flags, lookup: &lookup, settings: Vec::new() };
        let on_cloud_run = from.optional("K_SERVICE", parse::text)?.is_some();
        let port = from.optional("PORT", parse::port)?;
        let listen = from.required("BATON_LISTEN", parse::address)?;
        let proxies = if on_cloud_run { "1" } else { "0" };
        let trusted_proxies = from.found("BATON_TRUSTED_PROXIES", parse::count_or_none, proxies)? as usize;
        let keys = |text: &str| parse::keys(text).map(|keys| keys.into_iter().map(Redacted::new).collect());
        let secret = |text: &str| Some(Redacted::new(text.to_owned()));
        let state_dir = from.optional("BATON_STATE_DIR", parse::path)?;
        let state_dir = state_dir.unwrap_or_else(|| from.home("XDG_STATE_HOME", ".local/state", "/run"));
        let cache_dir = from.optional("BATON_CACHE_DIR", parse::path)?;
        let cache_dir = cache_dir.unwrap_or_else(|| from.home("XDG_CACHE_HOME", ".cache", "/var/cache"));
        let config = Self {
            listen: port.map_or(listen, |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)),
            admin_listen: from.required("BATON_ADMIN_LISTEN", parse::address_or_off)?,
            api_keys: from.optional("BATON_API_KEYS", api_keys)?.unwrap_or_default(),
            admin_key: from.optional("BATON_ADMIN_KEY", secret)?,
            plain: from.required("BATON_PLAIN", parse::plain_words)?,
            is_token_optional: from.required("BATON_ATTACH_TOKEN", parse::is_optional)?,
            origins: from.optional("BATON_ORIGINS", parse::names)?.unwrap_or_default(),
            rate_limit: from.required("BATON_RATE_LIMIT", parse::rate)?,
            trusted_proxies,
            hosts: from.optional("BATON_HOSTS", parse::names)?.unwrap_or_default(),
            connections: from.connections(trusted_proxies > 0)?,
            max_sandboxes: from.required("BATON_MAX_SANDBOXES", parse::count)? as usize,
            warm: from.required("BATON_WARM", parse::count_or_none)? as usize,
            limits: from.optional("BATON_LIMITS", parse::limits)?.unwrap_or_default(),
            quotas: from.optional("BATON_QUOTAS", Quotas::parse)?.unwrap_or_default(),
            detach_grace: from.required("BATON_DETACH_GRACE", parse::span)?,
            drain: from.required("BATON_DRAIN", parse::span)?,
            state_dir,
            socket_dir: from.required("BATON_SOCKET_DIR", parse::path)?,
            api_user: from.optional("BATON_API_USER", parse::count)?,
            cache_dir,
            runsc: from.optional("BATON_RUNSC", parse::path)?,
            rootfs: from.optional("BATON_ROOTFS", parse::path)?,
            agent: from.optional("BATON_AGENT", parse::path)?,
            cpu_features: from.optional("BATON_CPU_FEATURES", parse::names)?.unwrap_or_default(),
            rootfs_cache: from.required("BATON_ROOTFS_CACHE", parse::size)?,
            archive_size: from.required("BATON_ARCHIVE_SIZE", parse::size)?,
            archive_entries: from.required("BATON_ARCHIVE_ENTRIES", parse::count)?,
            archive_depth: from.required("BATON_ARCHIVE_DEPTH", parse::count)?,
            runtimes: from.optional("BATON_RUNTIMES", parse::digests)?,
            store_runtime: from.required("BATON_STORE_RUNTIME", parse::yes_no)?,
            log: from.required("BATON_LOG", parse::text)?,
            on_cloud_run,
            project: from.optional("GOOGLE_CLOUD_PROJECT", parse::text)?,
            storage: StorageVariables {
                metadata_bucket: from.optional("SANDBOX_METADATA_BUCKET", parse::text)?,
                metadata_mount: from.optional("SANDBOX_METADATA_MOUNT_PATH", parse::text)?,
                lock_bucket: from.optional("SANDBOX_LOCK_BUCKET", parse::text)?,
                checkpoint_bucket: from.optional("SANDBOX_CHECKPOINT_BUCKET", parse::text)?,
                checkpoint_mount: from.optional("SANDBOX_CHECKPOINT_MOUNT_PATH", parse::text)?,
                snapshot_bucket: from.optional("FILESYSTEM_SNAPSHOT_BUCKET", parse::text)?,
                snapshot_mount: from.optional("FILESYSTEM_SNAPSHOT_MOUNT_PATH", parse::text)?,
                all_mount: from.optional("CHECKPOINT_AND_RESTORE_PATH", parse::text)?,
            },
            gcs_endpoint: from.gcs_endpoint()?,
            otlp_endpoint: from.optional("OTEL_EXPORTER_OTLP_ENDPOINT", parse::url)?,
            otel_service: from.required("OTEL_SERVICE_NAME", parse::text)?,
            hmac_keys: from.optional("BATON_HMAC_KEY", keys)?.unwrap_or_default(),
            keep_checkpoints: from.required("BATON_KEEP_CHECKPOINTS", parse::count)?,
            checkpoint_every: from.required("BATON_CHECKPOINT_EVERY", parse::span_or_off)?,
            sweep: from.required("BATON_SWEEP", parse::span_or_off)?,
            retention: from.required("BATON_RETENTION", parse::span_or_off)?,
            lease: from.lease(on_cloud_run)?,
            settings: in_order_of_the_table(from.settings),
        };
        Ok(config)
    }

    /// Whether neither a flag nor a variable sets it.
    pub fn is_default(&self, name: &str) -> bool {
        self.settings.iter().any(|setting| setting.name == name && setting.source == SettingSource::Default)
    }

    /// Warnings about the settings that an operator should see before they take effect.
    pub fn warnings(&self) -> Vec<&'static str> {
        let is_ignored = !self.is_default("STORAGE_EMULATOR_HOST") && !self.is_default("BATON_GCS_ENDPOINT");
        let is_unsigned = self.storage.uses_a_bucket() && self.hmac_keys.is_empty();
        let is_open = !self.listen.ip().to_canonical().is_loopback() && self.api_keys.is_empty();
        // The API and the reconciler share these settings; only the API has the keys.
        let is_idle = self.api_keys.is_empty() && !self.is_default("BATON_QUOTAS");
        let warnings = [
            is_ignored.then_some("STORAGE_EMULATOR_HOST is ignored: BATON_GCS_ENDPOINT is set too and comes first"),
            is_unsigned.then_some(UNSIGNED),
            is_open.then_some(OPEN_TO_ALL),
            is_idle.then_some(
                "BATON_QUOTAS has no effect without BATON_API_KEYS: quotas are per tenant, and tenants have keys",
            ),
        ];
        warnings.into_iter().flatten().collect()
    }

    /// Every variable of the table, in its order.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }
}

fn in_order_of_the_table(mut settings: Vec<Setting>) -> Vec<Setting> {
    settings.sort_by_key(|setting| all().position(|variable| variable.name == setting.name));
    settings
}

struct Reader<'a> {
    flags: &'a Flags,
    lookup: &'a dyn Fn(&str) -> Option<String>,
    settings: Vec<Setting>,
}

impl Reader<'_> {
    fn optional<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>, Error> {
        let variable = find(name).expect("every name is in the table; a test reads them all");
        let set = |text: String| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let given = match self.flags.get(name) {
            Some(flag) => set(flag.clone()).map(|text| (text, SettingSource::Flag)),
            None => (self.lookup)(name).and_then(set).map(|text| (text, SettingSource::Variable)),
        };
        let (text, source) = match given {
            Some((text, source)) => (Some(text), source),
            None => (variable.preset.value().map(Cow::into_owned), SettingSource::Default),
        };
        let shown = text.clone().map(|text| if variable.kind.is_secret() { "(redacted)".to_owned() } else { text });
        self.settings.push(Setting { name: variable.name, value: shown.clone(), source });
        let Some(text) = text else { return Ok(None) };
        parse(&text).map(Some).ok_or_else(|| Error::Bad {
            name: match (source, variable.flag()) {
                (SettingSource::Flag, Some(flag)) => format!("--{flag}"),
                (SettingSource::Default | SettingSource::Variable | SettingSource::Flag, _) => name.to_owned(),
            },
            value: shown.unwrap_or_default(),
            expects: variable.kind.expects(),
        })
    }

    fn required<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, Error> {
        Ok(self.optional(name, parse)?.expect("the table has a default for it; a test reads them all"))
    }

    /// Reads a setting whose default depends on other settings, and records the effective value.
    fn found<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>, default: &str) -> Result<T, Error> {
        if let Some(given) = self.optional(name, &parse)? {
            return Ok(given);
        }
        if let Some(setting) = self.settings.last_mut() {
            setting.value = Some(default.to_owned());
        }
        Ok(parse(default).expect("a default is one of its kind; a test reads them all"))
    }

    /// A proxy keeps connections open for the next client; the longest common keep-alive timeout is ten minutes.
    fn connections(&mut self, is_proxied: bool) -> Result<ConnectionLimits, Error> {
        let connections = ConnectionLimits {
            keep_alive: self.found("BATON_KEEP_ALIVE", parse::span, if is_proxied { "620s" } else { "20s" })?,
            per_peer: self.required("BATON_PEER_CONNECTIONS", parse::count)? as usize,
            inbound_memory: self.required("BATON_INBOUND_MEMORY", parse::size)?,
        };
        if connections.inbound_memory < LONGEST_MESSAGE {
            let why = "BATON_INBOUND_MEMORY is below 16MiB, which is what one message may have: raise it";
            return Err(Error::Conflict(why.to_owned()));
        }
        Ok(connections)
    }

    /// The user's base directory of the given kind; records it as the effective value.
    fn home(&mut self, variable: &str, below_home: &str, without_home: &str) -> PathBuf {
        let set = |name: &str| (self.lookup)(name).filter(|text| text.starts_with('/')).map(PathBuf::from);
        let base = set(variable)
            .or_else(|| set("HOME").filter(|home| home.parent().is_some()).map(|home| home.join(below_home)))
            .unwrap_or_else(|| PathBuf::from(without_home));
        let path = base.join("baton");
        if let Some(setting) = self.settings.last_mut() {
            setting.value = Some(path.display().to_string());
        }
        path
    }

    /// Our own variable takes precedence over the one shared by all Google clients.
    fn gcs_endpoint(&mut self) -> Result<Option<String>, Error> {
        let ours = self.optional("BATON_GCS_ENDPOINT", parse::url)?;
        let theirs = self.optional("STORAGE_EMULATOR_HOST", parse::url_or_host)?;
        Ok(ours.or(theirs))
    }

    fn lease(&mut self, on_cloud_run: bool) -> Result<LeaseTimes, Error> {
        let renew = self.required("BATON_RENEW", parse::span)?;
        let hold = self.required("BATON_HOLD", parse::span)?;
        let takeover = self.required("BATON_TAKEOVER", parse::span)?;
        let handoff_wait = self.required("BATON_HANDOFF_WAIT", parse::span)?;
        let scale = self.required("BATON_TIME_SCALE", parse::factor)?;
        if on_cloud_run && scale != 1.0 {
            let why = "BATON_TIME_SCALE is for tests and is refused on Cloud Run: unset it";
            return Err(Error::Conflict(why.to_owned()));
        }
        let times = LeaseTimes { renew, hold, takeover, handoff_wait, ..LeaseTimes::DEFAULT };
        times.check().map_err(Error::Conflict)?;
        Ok(times.scaled(scale))
    }
}

#[cfg(test)]
mod tests;
