//! The OCI spec: the same for all sandboxes, because a checkpoint restores only into the same spec. All that
//! differs between sandboxes is sent in a frame. Pure.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::argv;

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

/// What the agent needs for the addresses and the rule of the network. No command has these.
const NETWORK_CAPABILITIES: [&str; 2] = ["CAP_NET_ADMIN", "CAP_NET_RAW"];

/// A version of the spec and of the flags that a checkpoint depends on. Older ones remain, so that older checkpoints can
/// be restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Without a network.
    Closed,
    /// The agent has the capabilities to give programs a network.
    #[default]
    Networked,
}

impl Layout {
    pub const ALL: [Self; 2] = [Self::Closed, Self::Networked];

    /// The layout whose spec has this SHA-256.
    pub fn find(sha256: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|layout| layout.sha256() == sha256)
    }

    pub fn has_network(self) -> bool {
        match self {
            Self::Closed => false,
            Self::Networked => true,
        }
    }

    /// SHA-256 of the spec without what may differ between instances: host paths, and the CPU features, which are
    /// compared separately.
    pub fn sha256(self) -> String {
        let mut text = String::new();
        canonical(&spec(self, Path::new(""), Path::new(""), None), &mut text);
        baton_protocol::id::hex(&Sha256::digest(text.as_bytes()))
    }

    /// The flags of runsc that belong to it.
    pub fn flags(self) -> Vec<String> {
        argv::flags(self)
    }

    fn capabilities(self) -> Vec<&'static str> {
        let more = if self.has_network() { &NETWORK_CAPABILITIES[..] } else { &[] };
        CAPABILITIES.iter().chain(more).copied().collect()
    }
}

/// The spec of a container on `rootfs` whose agent is in the host directory `agent_dir`.
pub fn spec(layout: Layout, rootfs: &Path, agent_dir: &Path, cpu_features: Option<&[String]>) -> Value {
    let mount = |at: &str, kind: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": kind, "options": options});
    let capabilities = layout.capabilities();
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
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
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
        let spec = spec(Layout::default(), Path::new("/base"), Path::new("/s/agent"), None);
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
        let spec = spec(Layout::default(), Path::new("/base"), Path::new("/a"), Some(&features));
        assert_eq!(spec["annotations"][CPU_FEATURES], json!("sse,avx"));
    }

    #[test]
    fn a_spec_that_changed_is_noticed_here_first() {
        // Another digest makes every stored checkpoint unusable: a change is another layout.
        assert_eq!(Layout::Closed.sha256(), "bd23fb1a5ddf66a05a533a4610de3fc695d21f7ad751a380c72af3023bcd29ec");
        assert_eq!(Layout::Networked.sha256(), "e8d90eef4c8607737f29311f810f63f7d4279814f69e27e04610e92404ffe4f3");
        assert!(Layout::ALL.into_iter().all(|layout| Layout::find(&layout.sha256()) == Some(layout)));
    }
}
