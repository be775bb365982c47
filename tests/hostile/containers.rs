//! Code in a sandbox that fights the limits of its container.
