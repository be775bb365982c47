//! Whoever can write objects, without the key of the server.
