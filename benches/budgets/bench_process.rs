//! What processes cost, as `/proc` tells it.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};

/// A figure in kB of `/proc/<pid>/<file>`, in bytes.
fn figure(pid: u32, file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kilobytes = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("/proc/{pid}/{file} has no {name}"))? * 1024)
}

pub fn rss(pid: u32) -> Result<u64> {
    figure(pid, "status", "VmRSS")
}

/// The most since [`reset_peak`].
pub fn peak_rss(pid: u32) -> Result<u64> {
    figure(pid, "status", "VmHWM")
}

pub fn reset_peak(pid: u32) -> Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").context("the peak of memory cannot be reset")
}

pub fn pss(pid: u32) -> u64 {
    figure(pid, "smaps_rollup", "Pss").unwrap_or(0)
}

/// The process's command line in one string.
pub fn line(pid: u32) -> String {
    String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).replace('\0', " ")
}

/// Everything below a process, children of children too.
pub fn descendants(of: u32) -> Result<Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // The name in parentheses may hold anything; the parent follows it and the state.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
    }
    let (mut found, mut next) = (Vec::new(), vec![of]);
    while let Some(pid) = next.pop() {
        for child in children.get(&pid).into_iter().flatten() {
            found.push(*child);
            next.push(*child);
        }
    }
    Ok(found)
}
