//! What a killed server leaves behind, and who removes it.
