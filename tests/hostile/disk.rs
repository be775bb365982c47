//! Disk of the host that a sandbox can fill.
