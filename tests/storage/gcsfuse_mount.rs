//! A bucket mounted by the real gcsfuse, with the options of `manifests/cloud-run-mounted.yaml`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// For as long as this lives; a test that fails leaves neither the mount nor its process behind.
#[derive(Debug)]
pub struct Gcsfuse {
    at: PathBuf,
    process: Child,
}

impl Gcsfuse {
    /// Mounts `bucket` of the Cloud Storage at `endpoint` over the directory `at`, which is made.
    pub fn mount(endpoint: &str, bucket: &str, at: &Path) -> Self {
        let program = std::env::var_os("BATON_GCSFUSE").map(PathBuf::from).filter(|path| path.exists());
        let program = program.expect("BATON_GCSFUSE names nothing that exists: run `scripts/setup --tests`");
        fs::create_dir_all(at).unwrap();
        let log = at.with_extension("gcsfuse.log");
        let output = fs::File::create(&log).unwrap();
        // It dies with the thread that starts it, and that with the test.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program);
        command.args(["--implicit-dirs", "--metadata-cache-negative-ttl-secs=0", "-o", "allow_other"]);
        command.args(["--foreground", "--enable-hns=false", "--anonymous-access"]);
        command.arg("--custom-endpoint").arg(format!("{endpoint}/storage/v1/")).arg(bucket).arg(at);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", "/");
        let process = command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
        let mut mounted = Self { at: at.to_owned(), process };
        let begun = Instant::now();
        while !is_mounted(at) {
            let ended = mounted.process.try_wait().unwrap();
            let said = || fs::read_to_string(&log).unwrap_or_default();
            assert!(ended.is_none(), "gcsfuse ended: is there /dev/fuse, and are you root?\n{}", said());
            assert!(begun.elapsed() < Duration::from_secs(60), "gcsfuse does not mount:\n{}", said());
            std::thread::sleep(Duration::from_millis(20));
        }
        mounted
    }

    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Gcsfuse {
    fn drop(&mut self) {
        // Whoever still has a file open there keeps it; nobody finds it any more.
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
        let begun = Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) {
            if begun.elapsed() > Duration::from_secs(10) {
                let _ = self.process.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn is_mounted(at: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mounts").unwrap();
    table.lines().any(|line| line.contains(" fuse.gcsfuse ") && line.split(' ').nth(1).map(Path::new) == Some(at))
}
