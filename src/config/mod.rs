//! Every setting of the server, read once into one immutable value. No other module reads the environment.
//!
//! A flag takes precedence over a variable, and a variable over the default; an empty value counts as
//! unset. Nothing here does I/O: a missing bucket or file is only noticed when it is needed.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use baton_protocol::{id::Sha256Name, limits::Bounds, metadata::PlainWords};
use serde::Serialize;

use crate::telemetry::Redacted;

mod connection_settings;
mod document;
mod egress_settings;
mod keys;
mod lease_times;
mod parse;
mod quotas;
mod setting_reader;
mod storage_settings;
mod variable;
pub mod variables;

pub use self::lease_times::{LeaseTimes, PollIntervals};
pub use connection_settings::ConnectionLimits;
pub use document::document;
pub use egress_settings::{EgressLimits, EgressSettings};
pub use keys::{ApiKey, api_keys};
pub use parse::Rate;
pub use quotas::{Quota, Quotas};
use setting_reader::Reader;
pub use storage_settings::StorageSettings;
pub use variable::{Preset, Section, ValueKind, Variable};
use variables::*;
pub use variables::{SECTIONS, all, find};

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
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
    /// Where ports of sandboxes have host names.
    pub domain: Option<String>,
    pub connections: ConnectionLimits,

    pub max_sandboxes: usize,
    pub warm: usize,
    pub limits: Bounds,
    pub quotas: Quotas,
    pub egress: EgressSettings,
    /// Of sandboxes whose client names none. `None` means never.
    pub idle_timeout: Option<Duration>,
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

    pub storage: StorageSettings,
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
        let on_cloud_run = from.optional(K_SERVICE, parse::text)?.is_some();
        let port = from.optional(PORT, parse::port)?;
        let listen = from.required(LISTEN, parse::address)?;
        let proxies = if on_cloud_run { "1" } else { "0" };
        let trusted_proxies = from.found(TRUSTED_PROXIES, parse::count_or_none, proxies)? as usize;
        let keys = |text: &str| parse::keys(text).map(|keys| keys.into_iter().map(Redacted::new).collect());
        let secret = |text: &str| Some(Redacted::new(text.to_owned()));
        let state_dir = from.optional(STATE_DIR, parse::path)?;
        let state_dir = state_dir.unwrap_or_else(|| from.home("XDG_STATE_HOME", ".local/state", "/run"));
        let cache_dir = from.optional(CACHE_DIR, parse::path)?;
        let cache_dir = cache_dir.unwrap_or_else(|| from.home("XDG_CACHE_HOME", ".cache", "/var/cache"));
        let lease = LeaseTimes::read(&mut from, on_cloud_run)?;
        let listen = port.map_or(listen, |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port));
        let is_local = trusted_proxies == 0 && listen.ip().to_canonical().is_loopback();
        let config = Self {
            listen,
            admin_listen: from.required(ADMIN_LISTEN, parse::address_or_off)?,
            api_keys: from.optional(API_KEYS, api_keys)?.unwrap_or_default(),
            admin_key: from.optional(ADMIN_KEY, secret)?,
            plain: from.required(PLAIN, parse::plain_words)?,
            is_token_optional: from.required(ATTACH_TOKEN, parse::is_optional)?,
            origins: from.optional(ORIGINS, parse::names)?.unwrap_or_default(),
            rate_limit: from.required(RATE_LIMIT, parse::rate)?,
            trusted_proxies,
            hosts: from.optional(HOSTS, parse::names)?.unwrap_or_default(),
            domain: from.found(DOMAIN, parse::domain_or_off, if is_local { "localhost" } else { "off" })?,
            connections: ConnectionLimits::read(&mut from, trusted_proxies > 0)?,
            max_sandboxes: from.required(MAX_SANDBOXES, parse::count)? as usize,
            warm: from.required(WARM, parse::count_or_none)? as usize,
            limits: from.optional(LIMITS, parse::limits)?.unwrap_or_default(),
            quotas: from.optional(QUOTAS, Quotas::parse)?.unwrap_or_default(),
            egress: EgressSettings::read(&mut from)?,
            idle_timeout: from.required(IDLE_TIMEOUT, parse::span_or_off)?,
            detach_grace: from.required(DETACH_GRACE, parse::span)?,
            drain: from.required(DRAIN, parse::span)?,
            state_dir,
            socket_dir: from.required(SOCKET_DIR, parse::path)?,
            api_user: from.optional(API_USER, parse::count)?,
            cache_dir,
            runsc: from.optional(RUNSC, parse::path)?,
            rootfs: from.optional(ROOTFS, parse::path)?,
            agent: from.optional(AGENT, parse::path)?,
            cpu_features: from.optional(CPU_FEATURES, parse::names)?.unwrap_or_default(),
            rootfs_cache: from.required(ROOTFS_CACHE, parse::size)?,
            archive_size: from.required(ARCHIVE_SIZE, parse::size)?,
            archive_entries: from.required(ARCHIVE_ENTRIES, parse::count)?,
            archive_depth: from.required(ARCHIVE_DEPTH, parse::count)?,
            runtimes: from.optional(RUNTIMES, parse::digests)?,
            store_runtime: from.required(STORE_RUNTIME, parse::yes_no)?,
            log: from.required(LOG, parse::text)?,
            on_cloud_run,
            project: from.optional(GOOGLE_CLOUD_PROJECT, parse::text)?,
            storage: StorageSettings::read(&mut from, lease.call)?,
            otlp_endpoint: from.optional(OTEL_EXPORTER_OTLP_ENDPOINT, parse::url)?,
            otel_service: from.required(OTEL_SERVICE_NAME, parse::text)?,
            hmac_keys: from.optional(HMAC_KEY, keys)?.unwrap_or_default(),
            keep_checkpoints: from.required(KEEP_CHECKPOINTS, parse::count)?,
            checkpoint_every: from.required(CHECKPOINT_EVERY, parse::span_or_off)?,
            sweep: from.required(SWEEP, parse::span_or_off)?,
            retention: from.required(RETENTION, parse::span_or_off)?,
            lease,
            settings: in_order_of_the_table(from.settings),
        };
        Ok(config)
    }

    /// Whether neither a flag nor a variable sets it.
    pub fn is_default(&self, variable: Variable) -> bool {
        let is_it = |setting: &&Setting| setting.name == variable.name;
        self.settings.iter().find(is_it).is_some_and(|setting| setting.source == SettingSource::Default)
    }

    /// Warnings about the settings that an operator should see before they take effect.
    pub fn warnings(&self) -> Vec<String> {
        let is_ignored = !self.is_default(STORAGE_EMULATOR_HOST) && !self.is_default(GCS_ENDPOINT);
        let is_unsigned = self.storage.uses_a_bucket() && self.hmac_keys.is_empty();
        let is_open = !self.listen.ip().to_canonical().is_loopback() && self.api_keys.is_empty();
        // The API and the reconciler share these settings; only the API has the keys.
        let is_idle = self.api_keys.is_empty() && !self.is_default(QUOTAS);
        let warnings = [
            is_ignored
                .then(|| format!("{STORAGE_EMULATOR_HOST} is ignored: {GCS_ENDPOINT} is set too and overrides it")),
            is_unsigned.then(|| {
                format!(
                    "{HMAC_KEY} is not set: everyone who can write objects to the bucket decides what sandboxes are \
                     restored from, and can give one sandbox the memory and files of another; set it to a secret of \
                     at least 32 bytes, the same for every instance"
                )
            }),
            is_open.then(|| {
                format!(
                    "{API_KEYS} is not set and the server does not listen on loopback: everyone who reaches it may \
                     create sandboxes"
                )
            }),
            is_idle.then(|| {
                format!("{QUOTAS} has no effect without {API_KEYS}: quotas are per tenant, and tenants have keys")
            }),
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

#[cfg(test)]
mod tests;
