//! Finds the parts of a sandbox: runsc, a root file system, the agent.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use baton_protocol::id::Sha256Name;

use crate::config::{
    Config, Variable,
    variables::{AGENT, ROOTFS, RUNSC},
};

const SETUP: &str = "run `scripts/setup`, which gets everything a sandbox needs";

#[derive(Clone, Debug)]
pub struct Pieces {
    pub runsc: PathBuf,
    pub rootfs: PathBuf,
    pub rootfs_digest: Sha256Name,
    pub agent: PathBuf,
}

impl Pieces {
    pub fn find(config: &Config) -> Result<Self> {
        // First: without root most of these paths cannot be read and would be reported missing.
        crate::runtime::check_root()?;
        let rootfs = match &config.rootfs {
            Some(path) => path.clone(),
            None => config.cache_dir.join("rootfs/current"),
        };
        let rootfs = rootfs
            .canonicalize()
            .with_context(|| format!("there is no root file system at {}: {SETUP}", rootfs.display()))?;
        if !rootfs.is_dir() {
            bail!("the root file system {} is not a directory", rootfs.display());
        }
        if rootfs == Path::new("/") {
            bail!("{ROOTFS} is this machine's own root file system; sandboxes need one of their own: {SETUP}");
        }
        let name = rootfs.file_name().and_then(|name| name.to_str());
        let rootfs_digest = match name.and_then(|name| Sha256Name::parse(name).ok()) {
            Some(name) => name,
            None => crate::runtime::rootfs_digest::digest(&rootfs)
                .with_context(|| format!("the root file system {} cannot be read", rootfs.display()))?,
        };
        Ok(Self { runsc: runsc(config)?, rootfs, rootfs_digest, agent: agent(config)? })
    }
}

fn runsc(config: &Config) -> Result<PathBuf> {
    if let Some(path) = &config.runsc {
        return existing(path.clone(), RUNSC);
    }
    let pinned = config.cache_dir.join("runsc/current");
    if !pinned.is_file() {
        bail!("there is no runsc at {}: {SETUP}", pinned.display());
    }
    Ok(pinned)
}

fn agent(config: &Config) -> Result<PathBuf> {
    if let Some(path) = &config.agent {
        return existing(path.clone(), AGENT);
    }
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("baton-agent"));
    let cached = config.cache_dir.join("agent/baton-agent");
    let found = [Some(cached), beside].into_iter().flatten().find(|path| path.is_file());
    found.with_context(|| format!("the agent was not found: {SETUP}"))
}

fn existing(path: PathBuf, variable: Variable) -> Result<PathBuf> {
    if !path.is_file() {
        bail!(
            "{variable} is {}, but that file does not exist: set another path, or unset the variable and {SETUP}",
            path.display()
        );
    }
    Ok(path)
}
