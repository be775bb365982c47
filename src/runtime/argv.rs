//! Every command line of runsc. Pure.

use std::{ffi::OsString, path::Path};

use super::bundle::Layout;

pub const PLATFORM: &str = "systrap";

/// The flags a checkpoint depends on: it restores only where they are the same.
pub fn flags(layout: Layout) -> Vec<String> {
    let mut flags = vec!["--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=root:dir"];
    if layout.has_network() {
        flags.push(NET_RAW);
    }
    flags.into_iter().map(str::to_owned).collect()
}

/// Without it there are no raw sockets inside, and no table of redirect rules, whatever the capabilities.
const NET_RAW: &str = "--net-raw";

/// Not stdout, because runsc writes its own messages there.
const STDIN: &str = "/proc/self/fd/0";

/// A command of runsc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunscCommand<'a> {
    /// `disk` is how many bytes the container may write to its files.
    Run {
        bundle: &'a Path,
        layout: Layout,
        disk: Option<u64>,
    },
    Restore {
        bundle: &'a Path,
        layout: Layout,
        image: &'a Path,
    },
    Checkpoint {
        image: &'a Path,
    },
    /// The archive is written to the pipe that is runsc's stdin.
    Tar,
    Delete,
}

impl RunscCommand<'_> {
    /// The name for messages.
    pub fn name(self) -> &'static str {
        match self {
            RunscCommand::Run { .. } => "create",
            RunscCommand::Restore { .. } => "restore",
            RunscCommand::Checkpoint { .. } => "checkpoint",
            RunscCommand::Tar => "snapshot",
            RunscCommand::Delete => "remove",
        }
    }
}

/// The arguments after `runsc`.
pub fn line(root: &Path, overlay: &Path, log: &Path, verb: RunscCommand<'_>, container: &str) -> Vec<OsString> {
    let mut overlay2 = OsString::from("--overlay2=root:dir=");
    overlay2.push(overlay);
    // Only at creation: a checkpoint contains its own size.
    if let RunscCommand::Run { disk: Some(disk), .. } = verb {
        overlay2.push(format!(",size={disk}"));
    }
    let mut line: Vec<OsString> = vec!["--root".into(), root.into()];
    line.extend(["--platform=systrap", "--network=none", "--ignore-cgroups"].map(OsString::from));
    line.extend([overlay2, "--log".into(), log.into(), "--log-format=json".into()]);
    if let RunscCommand::Run { layout, .. } | RunscCommand::Restore { layout, .. } = verb
        && layout.has_network()
    {
        line.push(NET_RAW.into());
    }
    let mut add = |words: &[&str]| line.extend(words.iter().map(OsString::from));
    match verb {
        RunscCommand::Run { .. } => add(&["run", "--bundle"]),
        RunscCommand::Restore { .. } => add(&["restore", "--bundle"]),
        RunscCommand::Checkpoint { .. } => {
            add(&["checkpoint", "--leave-running", "--compression=none", "--image-path"])
        }
        RunscCommand::Tar => add(&["tar", "rootfs-upper", "--file", STDIN]),
        RunscCommand::Delete => add(&["delete", "--force"]),
    }
    match verb {
        RunscCommand::Run { bundle, .. } => line.push(bundle.into()),
        RunscCommand::Restore { bundle, image, .. } => {
            line.extend([bundle.into(), "--image-path".into(), image.into()])
        }
        RunscCommand::Checkpoint { image } => line.push(image.into()),
        RunscCommand::Tar | RunscCommand::Delete => {}
    }
    line.push(container.into());
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(verb: RunscCommand<'_>) -> String {
        let words = line(Path::new("/s/runsc"), Path::new("/s/overlay"), Path::new("/s/log"), verb, "c1");
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_command_line_begins_with_the_same_flags_and_ends_with_the_container() {
        let global = "--root /s/runsc --platform=systrap --network=none --ignore-cgroups \
                      --overlay2=root:dir=/s/overlay --log /s/log --log-format=json";
        let (bundle, image) = (Path::new("/s/b"), Path::new("/s/i"));
        let (old, new) = (Layout::Closed, Layout::Networked);
        for (verb, expected) in [
            (RunscCommand::Run { bundle, layout: old, disk: None }, "run --bundle /s/b c1"),
            (RunscCommand::Run { bundle, layout: new, disk: None }, "--net-raw run --bundle /s/b c1"),
            (RunscCommand::Restore { bundle, layout: old, image }, "restore --bundle /s/b --image-path /s/i c1"),
            (
                RunscCommand::Restore { bundle, layout: new, image },
                "--net-raw restore --bundle /s/b --image-path /s/i c1",
            ),
            (RunscCommand::Checkpoint { image }, "checkpoint --leave-running --compression=none --image-path /s/i c1"),
            (RunscCommand::Tar, "tar rootfs-upper --file /proc/self/fd/0 c1"),
            (RunscCommand::Delete, "delete --force c1"),
        ] {
            assert_eq!(text(verb), format!("{global} {expected}"));
        }
    }

    #[test]
    fn the_size_of_the_disk_is_told_at_birth() {
        let bundle = Path::new("/s/b");
        let born = text(RunscCommand::Run { bundle, layout: Layout::default(), disk: Some(1 << 30) });
        assert!(born.contains(" --overlay2=root:dir=/s/overlay,size=1073741824 "), "{born}");
    }

    #[test]
    fn nothing_is_ever_detached() {
        let bundle = Path::new("/s/b");
        assert!(!text(RunscCommand::Run { bundle, layout: Layout::default(), disk: None }).contains("detach"));
        assert!(!text(RunscCommand::Restore { bundle, layout: Layout::default(), image: bundle }).contains("detach"));
    }
}
