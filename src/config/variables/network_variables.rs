//! What programs in sandboxes may reach.

use super::{
    Preset::{Is, Unset},
    Section, ValueKind, Variable,
};

section! {
    NETWORK, "Network of sandboxes",
    EGRESS = (
        "BATON_EGRESS", Egress, Is("none"),
        "Where programs in a sandbox may connect to, unless its client or an operator says otherwise: none, any, or a list of names, *.names, addresses and networks, each with or without a port",
    );
    EGRESS_MAX = (
        "BATON_EGRESS_MAX", Egress, Is("any"),
        "The most that a client or an operator may allow a sandbox; applies to running sandboxes too",
    );
    EGRESS_EXEMPT = (
        "BATON_EGRESS_EXEMPT", Addresses, Unset,
        "Exact addresses that sandboxes may reach although they are private, local or otherwise special, each with or without a port",
    );
    EGRESS_LIMITS = (
        "BATON_EGRESS_LIMITS", EgressLimits, Is("connections=1024,opens=200/s,rate=off,total=off,connect=10s,idle=1h,lifetime=off"),
        "Limits per sandbox: connections at once, new ones per second, bytes per second, bytes until it moves or ends; and per connection: the time to connect, to be silent, and to live",
    );
}
