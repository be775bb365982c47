//! The OCI spec: the same for all sandboxes, because a checkpoint restores only into the same spec. All that
//! differs between sandboxes is sent in a frame. Pure.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The usual capabilities of a container's root process. The kernel they apply to is the sandbox's own.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
];

const OPEN_FILES: u64 = 1 << 20;
const CPU_FEATURES: &str = "dev.gvisor.internal.cpufeatures";

/// The spec of a container on `rootfs` whose agent is in the host directory `agent_dir`.
pub fn spec(rootfs: &Path, agent_dir: &Path, cpu_features: Option<&[String]>) -> Value {
    let mount = |at: &str, kind: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": kind, "options": options});
    let mut spec = json!({
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": ["/.baton/agent"],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"],
            "cwd": "/",
            "capabilities": {
                "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES,
                "inheritable": [], "ambient": [],
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": OPEN_FILES, "soft": OPEN_FILES}],
            "noNewPrivileges": false,
        },
        "root": {"path": rootfs, "readonly": false},
        "mounts": [
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
            mount("/dev", "tmpfs", &["nosuid", "mode=755"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec"]),
            mount("/dev/shm", "tmpfs", &["nosuid", "nodev", "mode=1777"]),
            {"destination": "/.baton", "type": "bind", "source": agent_dir, "options": ["ro", "nosuid", "nodev"]},
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network"},
            ],
            "resources": {},
        },
    });
    if let Some(features) = cpu_features {
        spec["annotations"] = json!({CPU_FEATURES: features.join(",")});
    }
    spec
}

/// SHA-256 of the spec without what may differ between instances: host paths, and the CPU features, which are
/// compared separately.
pub fn sha256() -> String {
    let mut text = String::new();
    canonical(&spec(Path::new(""), Path::new(""), None), &mut text);
    baton_protocol::id::hex(&Sha256::digest(text.as_bytes()))
}

/// JSON with sorted keys, independent of the features the library was built with.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            out.push('{');
            for (key, value) in map.iter().collect::<BTreeMap<_, _>>() {
                out.push_str(&format!("{key:?}:"));
                canonical(value, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(values) => {
            out.push('[');
            for value in values {
                canonical(value, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => out.push_str(&value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_the_host_is_writable_inside() {
        let spec = spec(Path::new("/base"), Path::new("/s/agent"), None);
        for mount in spec["mounts"].as_array().unwrap() {
            if mount["type"] == "bind" {
                assert!(mount["options"].as_array().unwrap().contains(&json!("ro")), "{mount}");
            }
        }
        assert_eq!(spec["linux"]["resources"], json!({}));
        assert_eq!(spec["process"]["args"], json!(["/.baton/agent"]));
        assert_eq!(spec["process"]["terminal"], json!(false));
    }

    #[test]
    fn the_configured_cpu_features_are_there_from_birth() {
        let features = ["sse".to_owned(), "avx".to_owned()];
        let spec = spec(Path::new("/base"), Path::new("/a"), Some(&features));
        assert_eq!(spec["annotations"][CPU_FEATURES], json!("sse,avx"));
    }

    #[test]
    fn a_spec_that_changed_is_noticed_here_first() {
        // Another digest makes every stored checkpoint unusable: change it only with a migration plan.
        assert_eq!(sha256(), "bd23fb1a5ddf66a05a533a4610de3fc695d21f7ad751a380c72af3023bcd29ec");
    }
}
