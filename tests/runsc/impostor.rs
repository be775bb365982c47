//! Containers whose process 1 is a script of the test's own.

use std::{os::unix::fs::PermissionsExt, path::PathBuf};

use baton::runtime::RuntimeSettings;

use super::fixture::Place;

/// Speaks just enough of the protocol to be taken for an agent.
const HEAD: &str = r#"#!/usr/bin/python3
import os, struct, json, time
def crc(data):
    c = 0xffffffff
    for byte in data:
        c ^= byte
        for _ in range(8):
            c = (c >> 1) ^ (0x82f63b78 if c & 1 else 0)
    return c ^ 0xffffffff
def frame(kind, payload=b'', sequence=0, exec=0, length=None):
    head = struct.pack('<IBBBBIQQ', len(payload) if length is None else length, 1, kind, 0, 0, exec, 0, sequence)
    return head + struct.pack('<I', crc(head + payload)) + payload
def say(data):
    while data:
        data = data[os.write(1, data):]
def read(count):
    data = b''
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more: os._exit(0)
        data += more
    return data
def hear():
    head = read(32)
    length, _, kind = struct.unpack('<IBB', head[:6])
    return kind, struct.unpack('<Q', head[20:28])[0], read(length)
def greet():
    say(frame(64, json.dumps({'version': 1}).encode()))
    while True:
        kind, sequence, _ = hear()
        if kind == 16:
            say(frame(70, sequence=sequence))
            return
"#;

pub async fn place_with(agent: &str) -> (Place, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{HEAD}{agent}\n")).unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path: PathBuf = file.path().to_owned();
    (Place::with(|settings| RuntimeSettings { agent: path, ..settings }).await, file)
}
