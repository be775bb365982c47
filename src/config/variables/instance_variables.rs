//! What an instance runs, and with what.

use super::{
    Preset::{Found, Is, Unset},
    Section, ValueKind, Variable,
};

section! {
    SANDBOXES, "Sandboxes",
    MAX_SANDBOXES = (
        "BATON_MAX_SANDBOXES", Count, Is("64"),
        "Maximum number of sandboxes on this instance",
    );
    WARM = (
        "BATON_WARM", CountOrNone, Is("1"),
        "Containers kept ready for new sandboxes without limits and without a snapshot, as far as capacity allows",
    );
    LIMITS = (
        "BATON_LIMITS", Limits, Unset,
        "Default and maximum of a sandbox's memory, cpus, pids, disk and files",
    );
    QUOTAS = (
        "BATON_QUOTAS", Quotas, Unset,
        "Maximum per tenant: sandboxes on this instance, stored snapshots, and the idle timeout of new sandboxes (docs/tenants.md)",
    );
    IDLE_TIMEOUT = (
        "BATON_IDLE_TIMEOUT", SpanOrOff, Is("5m"),
        "Idle timeout of sandboxes whose client names none; off for never",
    );
    DETACH_GRACE = (
        "BATON_DETACH_GRACE", Span, Is("60s"),
        "How long output is kept in full for a disconnected client; then the oldest is dropped",
    );
    DRAIN = (
        "BATON_DRAIN", Span, Is("8s"),
        "How long a drain may take after SIGTERM; Cloud Run allows 10s",
    );
}

section! {
    MACHINE, "Machine",
    STATE_DIR = (
        "BATON_STATE_DIR", Path, Found("$XDG_STATE_HOME/baton, else ~/.local/state/baton, else /run/baton"),
        "Directory of sockets, bundles, writable layers and staged checkpoints; not shared between servers",
    );
    SOCKET_DIR = (
        "BATON_SOCKET_DIR", Path, Is("/run/baton-halves"),
        "Directory of the socket between `baton api` and `baton reconciler`, the same for both; a short path",
    );
    API_USER = (
        "BATON_API_USER", Count, Unset,
        "User id that `baton api` runs as, for `baton reconciler`; unset, its own",
    );
    CACHE_DIR = (
        "BATON_CACHE_DIR", Path, Found("$XDG_CACHE_HOME/baton, else ~/.cache/baton, else /var/cache/baton"),
        "Directory of files that can be rebuilt or downloaded again; scripts/setup fills it",
    );
    RUNSC = (
        "BATON_RUNSC", Path, Found("the pinned build in the cache"),
        "Path of runsc; a checkpoint can be restored only by the version that took it",
    );
    ROOTFS = (
        "BATON_ROOTFS", Path, Found("rootfs/current in the cache"),
        "Base root file system of sandboxes; must not change while it is in use",
    );
    AGENT = (
        "BATON_AGENT", Path, Found("beside the server, else in the cache"),
        "Path of the static program that runs as process 1 of every sandbox",
    );
    CPU_FEATURES = (
        "BATON_CPU_FEATURES", Names, Unset,
        "CPU features that sandboxes can use, so that checkpoints can be restored on other CPUs; unset, all features of this machine",
    );
    ROOTFS_CACHE = (
        "BATON_ROOTFS_CACHE", Size, Is("10GiB"),
        "Size of the cache of extracted root file systems; the least recently used are removed first",
    );
    ARCHIVE_SIZE = (
        "BATON_ARCHIVE_SIZE", Size, Is("10GiB"),
        "Maximum extracted size of an archive that becomes a root file system, including holes",
    );
    ARCHIVE_ENTRIES = (
        "BATON_ARCHIVE_ENTRIES", Count, Is("1000000"),
        "Maximum number of files and directories in such an archive",
    );
    ARCHIVE_DEPTH = (
        "BATON_ARCHIVE_DEPTH", Count, Is("128"),
        "Maximum depth of directories in such an archive",
    );
    RUNTIMES = (
        "BATON_RUNTIMES", Digests, Unset,
        "SHA-256 digests of the runsc binaries that may be downloaded from storage and run, for checkpoints of other versions; unset, those known to this build",
    );
    STORE_RUNTIME = (
        "BATON_STORE_RUNTIME", YesNo, Is("true"),
        "Whether to upload runsc and the base root file system once, so that checkpoints can be restored after either is updated",
    );
    LOG = (
        "BATON_LOG", Text, Is("info"),
        "Log filter, in the syntax of tracing",
    );
    K_SERVICE = (
        "K_SERVICE", Platform, Unset,
        "Set by Cloud Run: log lines are JSON, and BATON_TIME_SCALE is rejected",
    );
    GOOGLE_CLOUD_PROJECT = (
        "GOOGLE_CLOUD_PROJECT", Text, Unset,
        "Project on Cloud Run; Cloud Logging then shows log lines with their trace",
    );
    OTEL_EXPORTER_OTLP_ENDPOINT = (
        "OTEL_EXPORTER_OTLP_ENDPOINT", Url, Unset,
        "Collector that traces are sent to, as OTLP over HTTP",
    );
    OTEL_SERVICE_NAME = (
        "OTEL_SERVICE_NAME", Text, Is("baton"),
        "Service name in traces",
    );
}
