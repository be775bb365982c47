//! Connections that are opened and then left idle.
