//! Who may connect, and within which limits.

use super::{
    Preset::{Found, Is, Unset},
    Section, ValueKind, Variable,
};

section! {
    ACCESS, "Access",
    PORT = (
        "PORT", Port, Unset,
        "Port to listen on, on all addresses; overrides BATON_LISTEN. Cloud Run sets it",
    );
    LISTEN = (
        "BATON_LISTEN", Address, Is("127.0.0.1:8080"),
        "Address to listen on",
    );
    ADMIN_LISTEN = (
        "BATON_ADMIN_LISTEN", AddressOrOff, Is("127.0.0.1:9464"),
        "Address that serves /metrics, without authentication; if the default address is in use, metrics are not served",
    );
    API_KEYS = (
        "BATON_API_KEYS", ApiKeys, Unset,
        "API keys, each with its tenant (docs/tenants.md); `/create` and `/execute` require one. Unset, they require none",
    );
    ADMIN_KEY = (
        "BATON_ADMIN_KEY", Secret, Unset,
        "Key that `GET /sandboxes` requires; unset, the list is disabled",
    );
    ATTACH_TOKEN = (
        "BATON_ATTACH_TOKEN", Requirement, Is("required"),
        "Whether an attach requires the sandbox's token; if optional, the id is enough",
    );
    PLAIN = (
        "BATON_PLAIN", PlainWords, Is("documents"),
        "The messages that plain clients get; with predecessor, all of them get the messages and defaults of the Python predecessor, not only those that send one of its flags",
    );
    ORIGINS = (
        "BATON_ORIGINS", Names, Unset,
        "Web origins that may connect, or *; requests without an Origin header are always accepted",
    );
    RATE_LIMIT = (
        "BATON_RATE_LIMIT", Rate, Is("10/s"),
        "Failed requests (wrong token or key, unknown id) that are answered per address; requests beyond that are rejected unread. Requests with a valid key are neither counted nor rejected",
    );
    TRUSTED_PROXIES = (
        "BATON_TRUSTED_PROXIES", CountOrNone, Found("1 on Cloud Run, else 0"),
        "Number of proxies in front of the server that append to X-Forwarded-For; with 0 the header is ignored",
    );
    HOSTS = (
        "BATON_HOSTS", Names, Unset,
        "Host names besides localhost that /status, /sandboxes and /metrics accept, or *; unset, every name, but only localhost on a loopback address without a proxy",
    );
    DOMAIN = (
        "BATON_DOMAIN", DomainOrOff, Found("localhost on a loopback address without a proxy, else off"),
        "Domain below which each port of a sandbox has a host name and so an origin of its own, {port}-{id}.DOMAIN; needs a wildcard DNS record and, for https, a wildcard certificate (docs/network.md)",
    );
}

section! {
    CONNECTIONS, "Connections",
    KEEP_ALIVE = (
        "BATON_KEEP_ALIVE", Span, Found("20s; behind a proxy 620s"),
        "How long an idle connection is kept open between requests; at most 30s before the first one",
    );
    PEER_CONNECTIONS = (
        "BATON_PEER_CONNECTIONS", Count, Is("256"),
        "Connections per address that have shown neither a key nor a token; one more closes the oldest. Not applied behind a proxy",
    );
    INBOUND_MEMORY = (
        "BATON_INBOUND_MEMORY", Size, Is("64MiB"),
        "Memory for incomplete messages and request bodies of all clients; at least 16MiB",
    );
}
