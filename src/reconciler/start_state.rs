//! What the container of the sandbox starts from, and how it was started.

use baton_protocol::{
    frame::Marker,
    manifest::{Rootfs, RunscBuild},
    sandbox_network::Egress,
};

use super::actions::fetch_head::Fetching;
use crate::{
    bus::StartKind,
    runtime::{Layout, RootfsGuard},
};

#[derive(Debug, Default)]
pub(super) struct StartState {
    /// Terminates partial frames sent to the agent; kept across restores.
    pub(super) marker: Option<Marker>,
    /// Its root file system, if that is not the base or was looked up.
    pub(super) rootfs: Option<HeldRootfs>,
    /// The runsc it runs with, if that is not this instance's own.
    pub(super) runsc: Option<RunscBuild>,
    /// The layout of its container; that of an older checkpoint stays.
    pub(super) layout: Layout,
    /// The policy that the container got last.
    pub(super) egress: Option<Egress>,
    /// What the head needs and this instance lacks.
    pub(super) missing: Option<MissingParts>,
    /// The head's memory cannot be used here.
    pub(super) files_only: bool,
    /// The head is being fetched.
    pub(super) fetching: Option<Fetching>,
    /// How it was started, until that is announced.
    pub(super) kind: Option<StartKind>,
}

/// What the head of a sandbox needs and this instance lacks.
#[derive(Clone, Debug)]
pub(super) struct MissingParts {
    pub(super) rootfs: Rootfs,
    /// `None`: this instance's own runsc is sufficient.
    pub(super) runsc: Option<RunscBuild>,
}

/// A root file system, kept in the cache while the sandbox uses it.
#[derive(Clone, Debug)]
pub(super) struct HeldRootfs {
    pub(super) rootfs: Rootfs,
    #[expect(dead_code, reason = "held, not read")]
    pub(super) guard: RootfsGuard,
}

impl StartState {
    /// Discards files fetched for another head, or for a start that is no longer wanted.
    pub(super) async fn abandon_fetch(&mut self) {
        if let Some(fetching) = self.fetching.take() {
            fetching.abandon().await;
        }
    }
}
