//! The table of every variable that the server reads: name, kind, default, meaning.
//! `baton config`, the flags of `baton serve` and `docs/configuration.md` are generated from it.

use std::{borrow::Cow, time::Duration};

use Preset::{Found, Is, Time, Unset};

use super::LeaseTimes;

/// The kind of value that a variable takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    Text,
    Secret,
    ApiKeys,
    Keys,
    Names,
    Digests,
    Path,
    Port,
    Address,
    AddressOrOff,
    Url,
    YesNo,
    Count,
    CountOrNone,
    Factor,
    Size,
    Span,
    SpanOrOff,
    Rate,
    Limits,
    Quotas,
    PlainWords,
    Requirement,
}

impl ValueKind {
    pub const fn expects(self) -> &'static str {
        match self {
            Self::Text | Self::Secret => "text",
            Self::Names => "a list separated by commas",
            Self::ApiKeys => "keys separated by commas, each alone or as tenant=key, and none of two tenants",
            Self::Keys => "keys of at least 32 bytes each, separated by commas",
            Self::Digests => "SHA-256 digests of 64 hex digits in lower case, separated by commas",
            Self::Path => "a path",
            Self::Port => "a port such as 8080",
            Self::Address => "an address with a port such as 127.0.0.1:8080",
            Self::AddressOrOff => "an address with a port such as 127.0.0.1:9464, or off",
            Self::Url => "a URL such as http://127.0.0.1:4443",
            Self::YesNo => "true or false",
            Self::Count => "a whole number above zero",
            Self::CountOrNone => "a whole number; 0 is none",
            Self::Factor => "a number from 0.02 to 50",
            Self::Size => "a size such as 512MiB or 10GiB",
            Self::Span => "a duration such as 500ms, 15s or 2m",
            Self::SpanOrOff => "a duration such as 90s or 30days, or off",
            Self::Rate => "a rate such as 10/s or 100/m, or off",
            Self::PlainWords => "documents or predecessor",
            Self::Requirement => "required or optional",
            Self::Limits => "limits such as memory=512MiB/2GiB,cpus=1/4,pids=256 (default/ceiling)",
            Self::Quotas => "quotas such as sandboxes=20,snapshots=50,idle=1h;team-a:sandboxes=100",
        }
    }

    pub const fn is_secret(self) -> bool {
        matches!(self, Self::Secret | Self::ApiKeys | Self::Keys)
    }
}

/// The value of an unset variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    Unset,
    Is(&'static str),
    /// In whole seconds; its number is elsewhere.
    Time(Duration),
    /// Determined at start; the text says how.
    Found(&'static str),
}

impl Preset {
    /// The value as it would be given.
    pub fn value(self) -> Option<Cow<'static, str>> {
        match self {
            Unset | Found(_) => None,
            Is(text) => Some(text.into()),
            Time(span) => Some(format!("{}s", span.as_secs()).into()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Variable {
    pub name: &'static str,
    flag: &'static str,
    pub kind: ValueKind,
    pub preset: Preset,
    pub meaning: &'static str,
}

impl Variable {
    /// The flag of `baton serve`, without its dashes. A variable that only the platform sets has none.
    pub fn flag(&self) -> Option<&'static str> {
        Some(self.flag).filter(|flag| !flag.is_empty())
    }
}

pub fn find(name: &str) -> Option<&'static Variable> {
    all().find(|variable| variable.name == name)
}

pub fn all() -> impl Iterator<Item = &'static Variable> {
    SECTIONS.iter().flat_map(|section| section.variables)
}

#[derive(Clone, Copy, Debug)]
pub struct Section {
    pub title: &'static str,
    pub variables: &'static [Variable],
}

const fn variable(
    name: &'static str,
    flag: &'static str,
    kind: ValueKind,
    preset: Preset,
    meaning: &'static str,
) -> Variable {
    Variable { name, flag, kind, preset, meaning }
}

pub const SECTIONS: &[Section] = &[
    Section {
        title: "Who may call",
        variables: &[
            variable(
                "PORT",
                "port",
                ValueKind::Port,
                Unset,
                "Listen on this port of all addresses, whatever BATON_LISTEN says; Cloud Run sets it",
            ),
            variable("BATON_LISTEN", "listen", ValueKind::Address, Is("127.0.0.1:8080"), "Listen here"),
            variable(
                "BATON_ADMIN_LISTEN",
                "admin-listen",
                ValueKind::AddressOrOff,
                Is("127.0.0.1:9464"),
                "Serve /metrics here, to whoever reaches it; if the default place is taken, nowhere",
            ),
            variable(
                "BATON_API_KEYS",
                "api-keys",
                ValueKind::ApiKeys,
                Unset,
                "Keys of which a create or an execute must show one, each of a tenant (docs/tenants.md); unset, whoever reaches the server may",
            ),
            variable(
                "BATON_ADMIN_KEY",
                "admin-key",
                ValueKind::Secret,
                Unset,
                "Key that opens the list of sandboxes; unset, the list is closed",
            ),
            variable(
                "BATON_ATTACH_TOKEN",
                "attach-token",
                ValueKind::Requirement,
                Is("required"),
                "Whether an attach must show the sandbox's token; optional, whoever knows an id may attach without one",
            ),
            variable(
                "BATON_PLAIN",
                "plain",
                ValueKind::PlainWords,
                Is("documents"),
                "Whose words plain clients hear that sent no flag of the Python predecessor's; predecessor gives all of them its words and defaults",
            ),
            variable(
                "BATON_ORIGINS",
                "origins",
                ValueKind::Names,
                Unset,
                "Web origins that may connect, or *; callers that are no web page send none and may",
            ),
            variable(
                "BATON_RATE_LIMIT",
                "rate-limit",
                ValueKind::Rate,
                Is("10/s"),
                "Wrong tokens and keys and unknown ids that are answered, per address; further ones are refused unread. A right key is never counted or refused",
            ),
            variable(
                "BATON_TRUSTED_PROXIES",
                "trusted-proxies",
                ValueKind::CountOrNone,
                Found("1 on Cloud Run, else 0"),
                "Proxies in front, each of which adds the address it saw to X-Forwarded-For; with none that header is ignored",
            ),
            variable(
                "BATON_HOSTS",
                "hosts",
                ValueKind::Names,
                Unset,
                "Names beside localhost under which /status, /sandboxes and /metrics answer, or *; unset, all names, and on a loopback address without a proxy localhost alone",
            ),
        ],
    },
    Section {
        title: "Connections",
        variables: &[
            variable(
                "BATON_KEEP_ALIVE",
                "keep-alive",
                ValueKind::Span,
                Found("20s; behind a proxy 620s"),
                "How long a connection may wait for its next request before it is closed; 30s at most for its first",
            ),
            variable(
                "BATON_PEER_CONNECTIONS",
                "peer-connections",
                ValueKind::Count,
                Is("256"),
                "Connections of one address that have shown neither a key nor a token; another one closes the oldest. Not applied behind a proxy",
            ),
            variable(
                "BATON_INBOUND_MEMORY",
                "inbound-memory",
                ValueKind::Size,
                Is("64MiB"),
                "Memory for messages and bodies that clients are still sending, of all clients together; at least 16MiB",
            ),
        ],
    },
    Section {
        title: "Room for sandboxes",
        variables: &[
            variable(
                "BATON_MAX_SANDBOXES",
                "max-sandboxes",
                ValueKind::Count,
                Is("64"),
                "Sandboxes on this instance at one time",
            ),
            variable(
                "BATON_WARM",
                "warm",
                ValueKind::CountOrNone,
                Is("1"),
                "Containers kept ready for new sandboxes that ask for no limits and no snapshot, as far as there is room; 0 is none",
            ),
            variable(
                "BATON_LIMITS",
                "limits",
                ValueKind::Limits,
                Unset,
                "What a sandbox gets of memory, cpus, pids, disk and files, and the most it may ask for",
            ),
            variable(
                "BATON_QUOTAS",
                "quotas",
                ValueKind::Quotas,
                Unset,
                "The most that one tenant may have: sandboxes at once on this instance, snapshots, and the idle time of new sandboxes (docs/tenants.md)",
            ),
            variable(
                "BATON_DETACH_GRACE",
                "detach-grace",
                ValueKind::Span,
                Is("60s"),
                "How long output waits for a client that went away, before the oldest is dropped",
            ),
            variable(
                "BATON_DRAIN",
                "drain",
                ValueKind::Span,
                Is("8s"),
                "How long the server may take to let its sandboxes go after SIGTERM; Cloud Run allows 10s",
            ),
        ],
    },
    Section {
        title: "On this machine",
        variables: &[
            variable(
                "BATON_STATE_DIR",
                "state-dir",
                ValueKind::Path,
                Found("$XDG_STATE_HOME/baton, else ~/.local/state/baton, else /run/baton"),
                "Sockets, bundles, what sandboxes write, checkpoints on their way; one server each",
            ),
            variable(
                "BATON_SOCKET_DIR",
                "socket-dir",
                ValueKind::Path,
                Is("/run/baton-halves"),
                "Directory of the socket between `baton api` and `baton reconciler`, the same for both; a short path",
            ),
            variable(
                "BATON_API_USER",
                "api-user",
                ValueKind::Count,
                Unset,
                "Number of the user `baton api` runs as, told to `baton reconciler`; unset, its own",
            ),
            variable(
                "BATON_CACHE_DIR",
                "cache-dir",
                ValueKind::Path,
                Found("$XDG_CACHE_HOME/baton, else ~/.cache/baton, else /var/cache/baton"),
                "What can be made or fetched again; scripts/setup fills it",
            ),
            variable(
                "BATON_RUNSC",
                "runsc",
                ValueKind::Path,
                Found("the pinned build in the cache"),
                "The runsc to use; a checkpoint restores only with the same version",
            ),
            variable(
                "BATON_ROOTFS",
                "rootfs",
                ValueKind::Path,
                Found("rootfs/current in the cache"),
                "Base root file system of sandboxes; nothing may change it while it is used",
            ),
            variable(
                "BATON_AGENT",
                "agent",
                ValueKind::Path,
                Found("beside the server, else in the cache"),
                "The static program that is process 1 of every sandbox",
            ),
            variable(
                "BATON_CPU_FEATURES",
                "cpu-features",
                ValueKind::Names,
                Unset,
                "CPU features that sandboxes may see, so that a checkpoint restores on other CPUs; unset, all of this machine",
            ),
            variable(
                "BATON_ROOTFS_CACHE",
                "rootfs-cache",
                ValueKind::Size,
                Is("10GiB"),
                "Root file systems kept in the cache, the least used dropped first",
            ),
            variable(
                "BATON_ARCHIVE_SIZE",
                "archive-size",
                ValueKind::Size,
                Is("10GiB"),
                "What an archive may hold that becomes a root file system, holes counted",
            ),
            variable(
                "BATON_ARCHIVE_ENTRIES",
                "archive-entries",
                ValueKind::Count,
                Is("1000000"),
                "Files and directories that it may hold",
            ),
            variable(
                "BATON_ARCHIVE_DEPTH",
                "archive-depth",
                ValueKind::Count,
                Is("128"),
                "How deep its directories may be",
            ),
            variable(
                "BATON_RUNTIMES",
                "runtimes",
                ValueKind::Digests,
                Unset,
                "SHA-256 of each runsc that may be fetched from storage and run, for checkpoints of other versions; unset, only those that this build knows",
            ),
            variable(
                "BATON_STORE_RUNTIME",
                "store-runtime",
                ValueKind::YesNo,
                Is("true"),
                "Store runsc and the base root file system once, so that checkpoints restore after an update of either",
            ),
            variable("BATON_LOG", "log", ValueKind::Text, Is("info"), "What is logged, as a tracing filter"),
            variable(
                "K_SERVICE",
                "",
                ValueKind::Text,
                Unset,
                "Set by Cloud Run: log lines are JSON then, and BATON_TIME_SCALE is refused",
            ),
            variable(
                "GOOGLE_CLOUD_PROJECT",
                "google-cloud-project",
                ValueKind::Text,
                Unset,
                "The project on Cloud Run: with it Cloud Logging shows the lines of a session with their trace",
            ),
            variable(
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                "otel-exporter-otlp-endpoint",
                ValueKind::Url,
                Unset,
                "Send traces to this collector, as OTLP over HTTP",
            ),
            variable(
                "OTEL_SERVICE_NAME",
                "otel-service-name",
                ValueKind::Text,
                Is("baton"),
                "What traces call this service",
            ),
        ],
    },
    Section {
        title: "Storage",
        variables: &[
            variable(
                "SANDBOX_METADATA_BUCKET",
                "sandbox-metadata-bucket",
                ValueKind::Text,
                Unset,
                "Bucket of locks and metadata; comes before the mount",
            ),
            variable(
                "SANDBOX_METADATA_MOUNT_PATH",
                "sandbox-metadata-mount-path",
                ValueKind::Path,
                Unset,
                "Directory of locks and metadata, on a local file system",
            ),
            variable("SANDBOX_LOCK_BUCKET", "sandbox-lock-bucket", ValueKind::Text, Unset, "Bucket of the locks alone"),
            variable(
                "SANDBOX_CHECKPOINT_BUCKET",
                "sandbox-checkpoint-bucket",
                ValueKind::Text,
                Unset,
                "Bucket of checkpoints; beside a mount, the name of the bucket that it shows",
            ),
            variable(
                "SANDBOX_CHECKPOINT_MOUNT_PATH",
                "sandbox-checkpoint-mount-path",
                ValueKind::Path,
                Unset,
                "Directory of checkpoints, or a mount of their bucket; comes before the bucket",
            ),
            variable(
                "FILESYSTEM_SNAPSHOT_BUCKET",
                "filesystem-snapshot-bucket",
                ValueKind::Text,
                Unset,
                "Bucket of snapshots; beside a mount, the name of the bucket that it shows",
            ),
            variable(
                "FILESYSTEM_SNAPSHOT_MOUNT_PATH",
                "filesystem-snapshot-mount-path",
                ValueKind::Path,
                Unset,
                "Directory of snapshots, or a mount of their bucket; comes before the bucket",
            ),
            variable(
                "CHECKPOINT_AND_RESTORE_PATH",
                "checkpoint-and-restore-path",
                ValueKind::Path,
                Unset,
                "Directory for every mount above that is not set",
            ),
            variable(
                "BATON_GCS_ENDPOINT",
                "gcs-endpoint",
                ValueKind::Url,
                Unset,
                "A Cloud Storage server to use in place of the real one, without credentials",
            ),
            variable(
                "STORAGE_EMULATOR_HOST",
                "storage-emulator-host",
                ValueKind::Url,
                Unset,
                "What Google's own clients read for the same: used when BATON_GCS_ENDPOINT is not set; a host and port will do",
            ),
            variable(
                "BATON_HMAC_KEY",
                "hmac-key",
                ValueKind::Keys,
                Unset,
                "Keys to sign locks, checkpoints and snapshots with, the same for every instance: the first signs, each is good, and what has no good signature is not started from; unset, nothing is signed",
            ),
            variable(
                "BATON_KEEP_CHECKPOINTS",
                "keep-checkpoints",
                ValueKind::Count,
                Is("2"),
                "Committed checkpoints kept per sandbox",
            ),
            variable(
                "BATON_CHECKPOINT_EVERY",
                "checkpoint-every",
                ValueKind::SpanOrOff,
                Is("off"),
                "Checkpoint running sandboxes this often, so that less is lost with an instance",
            ),
            variable(
                "BATON_SWEEP",
                "sweep",
                ValueKind::SpanOrOff,
                Is("60s"),
                "How often the store is searched for sandboxes that nobody looks after",
            ),
            variable(
                "BATON_RETENTION",
                "retention",
                ValueKind::SpanOrOff,
                Is("off"),
                "Delete sandboxes without a ttl of their own after this time",
            ),
        ],
    },
    Section {
        title: "The lease",
        variables: &[
            variable(
                "BATON_RENEW",
                "renew",
                ValueKind::Span,
                Time(LeaseTimes::DEFAULT.renew),
                "How often an instance renews its hold on a sandbox",
            ),
            variable(
                "BATON_HOLD",
                "hold",
                ValueKind::Span,
                Time(LeaseTimes::DEFAULT.hold),
                "How long a sandbox may run after the last renewal that succeeded",
            ),
            variable(
                "BATON_TAKEOVER",
                "takeover",
                ValueKind::Span,
                Time(LeaseTimes::DEFAULT.takeover),
                "How long a lease must stand still before another instance may take it",
            ),
            variable(
                "BATON_HANDOFF_WAIT",
                "handoff-wait",
                ValueKind::Span,
                Time(LeaseTimes::DEFAULT.handoff_wait),
                "How long an attach waits for a living owner to let go",
            ),
            variable(
                "BATON_TIME_SCALE",
                "time-scale",
                ValueKind::Factor,
                Is("1"),
                "For tests: all times of the lease and of storage calls, multiplied",
            ),
        ],
    },
];
