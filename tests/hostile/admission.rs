//! Memory that a client can take before it was admitted.
