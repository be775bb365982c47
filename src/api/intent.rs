//! What a request changes in the spec, or the documented refusal. Pure.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    event::Status,
    id::{CheckpointId, InstanceId, Nonce, SandboxId},
    limits::{Bounds, Limits},
    lock::Claim,
    metadata::{self, Claimed, DesiredState, PlainWords, Spec},
    request::{Idle, Persistence, Refusal, SandboxConfig},
    sandbox_network::Egress,
};

use super::dialect::Dialect;
use crate::config::{Quota, variables::EGRESS_MAX};

pub const NO_CHECKPOINT: &str = "Checkpointing is not enabled on the server.";
pub const NO_HANDOFF: &str = "Sandbox handoff requires checkpointing to be enabled.";
pub const NO_AUTO_CHECKPOINT: &str = "Idle timeout auto checkpoint requires checkpointing to be enabled.";
pub const NO_SNAPSHOT: &str = "Filesystem snapshot is not enabled on the server.";
pub const NO_ROOM: &str = "The server has no room for another sandbox.";
pub const SHUTTING_DOWN: &str = "The server is shutting down.";
pub const EXEC_IN_PROGRESS: &str = "Cannot checkpoint while an execution is in progress.";
const NOT_CHECKPOINTABLE: &str = "The sandbox was not created with checkpointing enabled.";
const NO_CPUS: &str = "`limits.cpus` cannot be kept here: this machine lets no cgroup hold CPUs.";
const LIMITED_ALREADY: &str = "`limits` cannot be chosen: a copy has those of the checkpoint it begins from.";
const COPY_IS_PERSISTENT: &str = "`persistent` cannot be false: a copy is stored beside the checkpoint it begins from.";
const TWO_ORIGINS: &str = "A sandbox begins from a checkpoint or from a filesystem snapshot, not from both.";
const TOO_LARGE: &str = "The config is too large: labels, env, cwd and network share 32 KiB.";
const LABELS_TOO_LARGE: &str = "`labels` may have 64 entries, with names of 256 bytes and values of 1 KiB.";
const ENV_TOO_LARGE: &str = "`env` may have 512 variables, with names of 256 bytes.";
const MOST_LABELS: usize = 64;
const MOST_VARIABLES: usize = 512;
const LONGEST_NAME: usize = 256;
const LONGEST_LABEL: usize = 1 << 10;
/// Leaves room in `metadata.json` for status and requests.
const MOST_BYTES: usize = 32 << 10;

/// What this server can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    pub checkpoint: bool,
    pub snapshot: bool,
    /// Hold a sandbox to a share of the CPUs.
    pub cpus: bool,
}

/// What a sandbox gets if its config does not say.
#[derive(Clone, Copy, Debug)]
pub struct Defaults<'a> {
    /// Idle timeout in seconds; `None` means never.
    pub idle: Option<u64>,
    pub limits: &'a Bounds,
    /// The most the tenant may ask for.
    pub quota: Quota,
    /// The most that it may reach.
    pub egress_max: &'a Egress,
}

/// Fills in the spec from the client's config.
pub fn create(
    mut spec: Spec,
    config: &SandboxConfig,
    dialect: Dialect,
    can: Abilities,
    defaults: Defaults<'_>,
) -> Result<Spec, Refusal> {
    let refuse = |message: &str| Err(Refusal::of(Status::CreationError, message));
    let is_asked = match config.persistent {
        Some(Persistence::Yes) => true,
        Some(Persistence::Auto) => can.checkpoint,
        Some(Persistence::No) | None => false,
    };
    let is_stored = config.enable_checkpoint || is_asked;
    if is_stored && !can.checkpoint {
        return refuse(NO_CHECKPOINT);
    }
    if config.persistent == Some(Persistence::No) && config.from_checkpoint.is_some() {
        return refuse(COPY_IS_PERSISTENT);
    }
    if config.enable_sandbox_handoff == Some(true) && !is_stored {
        return refuse(NO_HANDOFF);
    }
    if config.enable_idle_timeout_auto_checkpoint == Some(true) && !is_stored {
        return refuse(NO_AUTO_CHECKPOINT);
    }
    if config.filesystem_snapshot_name.is_some() && !can.snapshot {
        return refuse(NO_SNAPSHOT);
    }
    spec.limits = match limits(config, can, defaults.limits) {
        Ok(limits) => limits,
        Err(sentence) => return refuse(&sentence),
    };
    if let Some(egress) = &config.network.egress
        && let Some(beyond) = egress.beyond(defaults.egress_max)
    {
        return refuse(&format!(
            "`network.egress` asks for {beyond}, and this server allows sandboxes {} ({EGRESS_MAX}).",
            allowed(defaults.egress_max)
        ));
    }
    if config.from_checkpoint.is_some() && !can.checkpoint {
        return refuse(NO_CHECKPOINT);
    }
    if config.from_checkpoint.is_some() && config.filesystem_snapshot_name.is_some() {
        return refuse(TWO_ORIGINS);
    }
    let fits = |map: &BTreeMap<String, String>, most: usize, longest: usize| {
        map.len() <= most && map.iter().all(|(name, value)| name.len() <= LONGEST_NAME && value.len() <= longest)
    };
    if !fits(&config.labels, MOST_LABELS, LONGEST_LABEL) {
        return refuse(LABELS_TOO_LARGE);
    }
    if !fits(&config.env, MOST_VARIABLES, MOST_BYTES) {
        return refuse(ENV_TOO_LARGE);
    }
    let size = |map: &BTreeMap<String, String>| -> usize {
        map.iter().map(|(name, value)| name.len() + value.len() + 8).sum()
    };
    let destinations = config.network.egress.as_ref().map_or(0, |egress| egress.to_string().len());
    if size(&config.labels) + size(&config.env) + config.cwd.as_ref().map_or(0, String::len) + destinations > MOST_BYTES
    {
        return refuse(TOO_LARGE);
    }
    spec.idle_timeout = match idle_seconds(config.idle_timeout, defaults.idle, &defaults.quota) {
        Ok(idle) => idle,
        Err(sentence) => return refuse(&sentence),
    };
    // A sandbox that starts from a checkpoint is stored beside it.
    spec.enable_sandbox_checkpoint = is_stored || config.from_checkpoint.is_some();
    spec.from_checkpoint.clone_from(&config.from_checkpoint);
    // A stored sandbox keeps its state and can move unless the client opts out; clients of the predecessor opt in,
    // flag by flag or with `persistent`.
    let implied = spec.enable_sandbox_checkpoint && (is_asked || dialect != Dialect::Predecessor);
    spec.enable_sandbox_handoff = config.enable_sandbox_handoff.unwrap_or(implied);
    spec.enable_idle_timeout_auto_checkpoint = config.enable_idle_timeout_auto_checkpoint.unwrap_or(implied);
    spec.plain = Some(dialect.plain_words());
    spec.filesystem_snapshot_name.clone_from(&config.filesystem_snapshot_name);
    spec.labels.clone_from(&config.labels);
    spec.env.clone_from(&config.env);
    spec.cwd.clone_from(&config.cwd);
    spec.network.clone_from(&config.network);
    spec.ttl = config.ttl.map(whole_seconds);
    spec.on_incompatible = config.on_incompatible;
    Ok(spec)
}

fn allowed(egress: &Egress) -> String {
    match egress {
        Egress::None => "no connections".to_owned(),
        Egress::Any | Egress::List(_) => format!("only {egress}"),
    }
}

/// The limits of the sandbox. A copy gets those of its source, which are part of the checkpoint.
fn limits(config: &SandboxConfig, can: Abilities, bounds: &Bounds) -> Result<Limits, String> {
    if config.from_checkpoint.is_some() {
        return if config.limits.is_empty() { Ok(Limits::default()) } else { Err(LIMITED_ALREADY.to_owned()) };
    }
    if config.limits.cpus.is_some() && !can.cpus {
        return Err(NO_CPUS.to_owned());
    }
    let mut limits = bounds.apply(&config.limits)?;
    // The server logged this at startup: a limit that cannot be enforced is not promised.
    limits.cpus = limits.cpus.filter(|_| can.cpus);
    Ok(limits)
}

/// Rounds up to whole seconds, so that nothing ends earlier than requested.
pub fn whole_seconds(span: Duration) -> u64 {
    span.as_secs() + u64::from(span.subsec_nanos() > 0)
}

/// The idle timeout in whole seconds, `None` for never; the error names the quota that it exceeds.
pub fn idle_seconds(asked: Option<Idle>, default: Option<u64>, quota: &Quota) -> Result<Option<u64>, String> {
    let asked = asked.map(|asked| match asked {
        Idle::Never => None,
        Idle::After(span) => Some(whole_seconds(span)),
    });
    quota.idle_timeout(asked, default)
}

/// Sets the idle timeout. Returns whether the spec changed.
pub fn set_idle_timeout(spec: &mut Spec, seconds: Option<u64>) -> bool {
    std::mem::replace(&mut spec.idle_timeout, seconds) != seconds
}

/// Whether an attach takes the sandbox at once, even from a live client. Otherwise that client is probed first.
pub fn preempts(spec: &Spec, is_v1: bool) -> bool {
    is_v1 || spec.plain_words() == PlainWords::Predecessor
}

/// Requests that the sandbox runs here. Returns whether the spec changed. Deleted is final, and an operator's order to
/// another instance stands: the client follows it.
pub fn attach(spec: &mut Spec, here: &InstanceId, is_v1: bool, is_held_here: bool) -> bool {
    let kind = if preempts(spec, is_v1) { Claim::Preempt } else { Claim::Ask };
    let claim = Claimed { instance: here.clone(), kind };
    let is_so = spec.claim.as_ref() == Some(&claim);
    request_here(spec, claim, is_so, is_held_here)
}

/// Requests that the sandbox runs here, for a request to one of its ports: as [`attach`] by a client that never takes
/// it from another one. A claim of this instance stays as it is.
pub fn visit(spec: &mut Spec, here: &InstanceId, is_held_here: bool) -> bool {
    let is_so = spec.claim.as_ref().is_some_and(|claimed| claimed.instance == *here);
    request_here(spec, Claimed { instance: here.clone(), kind: Claim::Ask }, is_so, is_held_here)
}

/// `is_claimed`: the claim in the spec is good enough.
fn request_here(spec: &mut Spec, claim: Claimed, is_claimed: bool, is_held_here: bool) -> bool {
    let here = &claim.instance;
    let is_running = spec.desired_state == DesiredState::Running;
    let is_so = is_running && spec.placement.as_ref() == Some(here) && is_claimed;
    let is_ordered_away = is_running && is_held_here && spec.open_order().is_some_and(|named| named != here);
    if is_so || is_ordered_away || spec.desired_state == DesiredState::Deleted {
        return false;
    }
    spec.desired_state = DesiredState::Running;
    spec.placement = Some(here.clone());
    spec.claim = Some(claim);
    true
}

/// Sets the placement back to the holder after the client that attached here was told that the sandbox is in use,
/// unless the spec was changed since.
pub fn give_back(spec: &mut Spec, here: &InstanceId, holder: &InstanceId) -> bool {
    let is_ours = spec.placement.as_ref() == Some(here)
        && spec.claim.as_ref().is_some_and(|claimed| claimed.instance == *here && claimed.kind == Claim::Ask);
    if is_ours {
        spec.placement = Some(holder.clone());
        spec.claim = Some(Claimed { instance: holder.clone(), kind: Claim::Ask });
    }
    is_ours
}

/// Requests another state. Returns whether the spec changed; deleted is final.
pub fn desire(spec: &mut Spec, state: DesiredState) -> bool {
    if spec.desired_state == state || spec.desired_state == DesiredState::Deleted {
        return false;
    }
    spec.desired_state = state;
    true
}

/// Requests running again after this session's checkpoint failed, unless the spec was changed since.
pub fn revert_checkpoint(spec: &mut Spec, here: &InstanceId) -> bool {
    let ours = spec.desired_state == DesiredState::Checkpointed && spec.placement.as_ref() == Some(here);
    if ours {
        spec.desired_state = DesiredState::Running;
    }
    ours
}

/// Adds a one-shot request; its answer is stored under the nonce.
pub fn add_request(spec: &mut Spec, nonce: &Nonce, request: &metadata::SpecRequest) -> bool {
    spec.requests.insert(nonce.clone(), request.clone()).is_none()
}

/// Removes a one-shot request that was answered or that no session waits for.
pub fn remove_request(spec: &mut Spec, nonce: &Nonce) -> bool {
    spec.requests.remove(nonce).is_some()
}

/// Whether a checkpoint may be requested.
pub fn checkpoint(spec: &Spec, live: bool, running: bool, can: Abilities) -> Result<(), Refusal> {
    if !can.checkpoint {
        return Err(Refusal::of(Status::CheckpointError, NO_CHECKPOINT));
    }
    if !spec.enable_sandbox_checkpoint {
        return Err(Refusal::of(Status::CheckpointError, NOT_CHECKPOINTABLE));
    }
    if running && !live {
        return Err(Refusal::of(Status::ExecutionInProgressError, EXEC_IN_PROGRESS));
    }
    Ok(())
}

/// The spec of a copy of a sandbox, which the first attach starts.
pub fn copy(source: &Spec, checkpoint_id: &CheckpointId, id: SandboxId, token_sha256: String, created: String) -> Spec {
    Spec {
        sandbox_id: id,
        token_sha256,
        created_timestamp: created,
        from_checkpoint: Some(checkpoint_id.clone()),
        desired_state: DesiredState::Checkpointed,
        placement: None,
        claim: None,
        requests: BTreeMap::new(),
        traceparent: None,
        ..source.clone()
    }
}

/// Whether copies may be requested.
pub fn fork(spec: &Spec, can: Abilities) -> Result<(), Refusal> {
    let refuse = |refusal: Refusal| Refusal::of(Status::Error, format!("No fork was made: {}", refusal.message));
    checkpoint(spec, true, false, can).map_err(refuse)
}

pub fn snapshot(can: Abilities) -> Result<(), Refusal> {
    if can.snapshot { Ok(()) } else { Err(Refusal::of(Status::FilesystemSnapshotError, NO_SNAPSHOT)) }
}

/// Whether the sandbox can leave this instance and be restored.
pub fn handoff(spec: &Spec) -> Result<(), Refusal> {
    if spec.enable_sandbox_checkpoint { Ok(()) } else { Err(Refusal::of(Status::Error, NO_HANDOFF)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Abilities = Abilities { checkpoint: true, snapshot: true, cpus: true };
    const NONE: Abilities = Abilities { checkpoint: false, snapshot: false, cpus: false };

    fn create(spec: Spec, config: &SandboxConfig, can: Abilities, idle: Option<u64>) -> Result<Spec, Refusal> {
        super::create(
            spec,
            config,
            Dialect::Documents,
            can,
            Defaults { idle, limits: &Bounds::default(), quota: Quota::default(), egress_max: &Egress::Any },
        )
    }

    fn here() -> InstanceId {
        InstanceId::from_bits([1; 16])
    }

    fn spec() -> Spec {
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        Spec::new(id, String::new(), String::new(), here())
    }

    fn refused(config: SandboxConfig, can: Abilities) -> String {
        create(spec(), &config, can, Some(300)).unwrap_err().message
    }

    #[test]
    fn what_the_server_or_the_config_lacks_is_refused_with_its_text() {
        let checkpoint = SandboxConfig { enable_checkpoint: true, ..SandboxConfig::default() };
        assert_eq!(refused(checkpoint.clone(), NONE), NO_CHECKPOINT);
        let handoff = SandboxConfig { enable_sandbox_handoff: Some(true), ..SandboxConfig::default() };
        assert_eq!(refused(handoff, ALL), NO_HANDOFF);
        let auto = SandboxConfig { enable_idle_timeout_auto_checkpoint: Some(true), ..SandboxConfig::default() };
        assert_eq!(refused(auto, ALL), NO_AUTO_CHECKPOINT);
        let name = "x".parse().ok();
        assert_eq!(
            refused(SandboxConfig { filesystem_snapshot_name: name, ..SandboxConfig::default() }, NONE),
            NO_SNAPSHOT
        );
        let env = [("a".to_owned(), "b".repeat(MOST_BYTES))].into();
        assert_eq!(refused(SandboxConfig { env, ..SandboxConfig::default() }, ALL), TOO_LARGE);
        assert!(create(spec(), &checkpoint, ALL, None).unwrap().enable_sandbox_checkpoint);
    }

    #[test]
    fn labels_and_variables_are_bounded_in_count_and_length() {
        let many = |count: usize| (0..count).map(|number| (format!("n{number}"), String::new())).collect();
        let one = |name: usize, value: usize| [("n".repeat(name), "v".repeat(value))].into();
        for (labels, fits) in [
            (many(MOST_LABELS), true),
            (many(MOST_LABELS + 1), false),
            (one(LONGEST_NAME, LONGEST_LABEL), true),
            (one(LONGEST_NAME + 1, 0), false),
            (one(1, LONGEST_LABEL + 1), false),
        ] {
            let config = SandboxConfig { labels, ..SandboxConfig::default() };
            assert_eq!(
                create(spec(), &config, ALL, None).map_err(|refusal| refusal.message).err().as_deref(),
                (!fits).then_some(LABELS_TOO_LARGE)
            );
        }
        for (env, fits) in [
            (many(MOST_VARIABLES), true),
            (many(MOST_VARIABLES + 1), false),
            (one(LONGEST_NAME, MOST_BYTES / 2), true),
            (one(LONGEST_NAME + 1, 0), false),
        ] {
            let config = SandboxConfig { env, ..SandboxConfig::default() };
            assert_eq!(
                create(spec(), &config, ALL, None).map_err(|refusal| refusal.message).err().as_deref(),
                (!fits).then_some(ENV_TOO_LARGE)
            );
        }
    }

    /// The documented message enables both; an explicit flag wins; the predecessor implies neither.
    #[test]
    fn what_is_stored_moves_and_is_kept_unless_the_client_says_otherwise() {
        let flags = [None, Some(false), Some(true)];
        for dialect in [Dialect::V1, Dialect::Documents, Dialect::Predecessor] {
            for (handoff, auto) in flags.iter().flat_map(|handoff| flags.map(|auto| (*handoff, auto))) {
                let config = SandboxConfig {
                    enable_checkpoint: true,
                    enable_sandbox_handoff: handoff,
                    enable_idle_timeout_auto_checkpoint: auto,
                    ..SandboxConfig::default()
                };
                let defaults = Defaults {
                    idle: None,
                    limits: &Bounds::default(),
                    quota: Quota::default(),
                    egress_max: &Egress::Any,
                };
                let spec = super::create(spec(), &config, dialect, ALL, defaults).unwrap();
                let implied = dialect != Dialect::Predecessor;
                assert_eq!(spec.enable_sandbox_handoff, handoff.unwrap_or(implied), "{dialect:?}");
                assert_eq!(spec.enable_idle_timeout_auto_checkpoint, auto.unwrap_or(implied), "{dialect:?}");
                assert_eq!(spec.plain_words(), dialect.plain_words());
            }
        }
        let in_memory = create(spec(), &SandboxConfig::default(), ALL, None).unwrap();
        assert!(!in_memory.enable_sandbox_handoff && !in_memory.enable_idle_timeout_auto_checkpoint);
    }

    #[test]
    fn persistent_sets_all_three_flags_where_the_server_can_and_an_explicit_flag_wins() {
        let flags = |config: &SandboxConfig, dialect, can| {
            let defaults =
                Defaults { idle: None, limits: &Bounds::default(), quota: Quota::default(), egress_max: &Egress::Any };
            let created = super::create(spec(), config, dialect, can, defaults);
            created
                .map(|spec| {
                    let Spec { enable_sandbox_checkpoint, enable_sandbox_handoff, .. } = spec;
                    (enable_sandbox_checkpoint, enable_sandbox_handoff, spec.enable_idle_timeout_auto_checkpoint)
                })
                .map_err(|refusal| refusal.message)
        };
        let asked = |persistent| SandboxConfig { persistent: Some(persistent), ..SandboxConfig::default() };
        for dialect in [Dialect::V1, Dialect::Documents, Dialect::Predecessor] {
            for (persistent, can, expected) in [
                (Persistence::Yes, ALL, Ok((true, true, true))),
                (Persistence::Yes, NONE, Err(NO_CHECKPOINT.to_owned())),
                (Persistence::Auto, ALL, Ok((true, true, true))),
                (Persistence::Auto, NONE, Ok((false, false, false))),
                (Persistence::No, ALL, Ok((false, false, false))),
            ] {
                assert_eq!(flags(&asked(persistent), dialect, can), expected, "{persistent:?} {dialect:?}");
            }
            let stays = SandboxConfig { enable_sandbox_handoff: Some(false), ..asked(Persistence::Yes) };
            assert_eq!(flags(&stays, dialect, ALL), Ok((true, false, true)));
        }
    }

    #[test]
    fn the_idle_time_is_the_clients_or_the_servers() {
        let idle = |idle_timeout| {
            create(spec(), &SandboxConfig { idle_timeout, ..SandboxConfig::default() }, NONE, Some(300))
                .unwrap()
                .idle_timeout
        };
        assert_eq!(idle(None), Some(300));
        assert_eq!(idle(Some(Idle::Never)), None);
        assert_eq!(idle(Some(Idle::After(Duration::from_millis(1500)))), Some(2));
    }

    #[test]
    fn the_idle_time_is_within_the_quota_of_the_key() {
        let quota = Quota { idle: Some(Duration::from_secs(60)), ..Quota::default() };
        let idle = |idle_timeout| {
            let config = SandboxConfig { idle_timeout, ..SandboxConfig::default() };
            let defaults = Defaults { idle: Some(300), limits: &Bounds::default(), quota, egress_max: &Egress::Any };
            super::create(spec(), &config, Dialect::Documents, NONE, defaults).map(|spec| spec.idle_timeout)
        };
        assert_eq!(idle(None).unwrap(), Some(60));
        assert_eq!(idle(Some(Idle::After(Duration::from_secs(5)))).unwrap(), Some(5));
        for more in [Idle::Never, Idle::After(Duration::from_millis(60_001))] {
            let refusal = idle(Some(more)).unwrap_err();
            assert_eq!(refusal.status, Status::CreationError);
            assert!(refusal.message.contains("1m at most (`idle` in BATON_QUOTAS)"), "{}", refusal.message);
        }
    }

    #[test]
    fn limits_are_filled_from_the_servers_and_kept_below_them() {
        let bounds = Bounds::parse("memory=512MiB/1GiB,cpus=1/2").unwrap();
        let given = |limits: serde_json::Value, can| {
            let config = SandboxConfig { limits: serde_json::from_value(limits).unwrap(), ..SandboxConfig::default() };
            let created = super::create(
                spec(),
                &config,
                Dialect::Documents,
                can,
                Defaults { idle: None, limits: &bounds, quota: Quota::default(), egress_max: &Egress::Any },
            );
            created.map(|spec| serde_json::to_value(spec.limits).unwrap()).map_err(|refusal| refusal.message)
        };
        let json = |text: &str| serde_json::from_str(text).unwrap();
        assert_eq!(given(json("{}"), ALL), Ok(json(r#"{"memory":536870912,"cpus":1}"#)));
        assert_eq!(given(json(r#"{"cpus":1.5}"#), ALL), Ok(json(r#"{"memory":536870912,"cpus":1.5}"#)));
        let too_much = given(json(r#"{"memory":"2GiB"}"#), ALL).unwrap_err();
        assert_eq!(too_much, "`limits.memory` is 2GiB, and this server allows 1GiB at most.");
        assert_eq!(given(json(r#"{"cpus":1.5}"#), NONE), Err(NO_CPUS.to_owned()));
        assert_eq!(given(json("{}"), NONE), Ok(json(r#"{"memory":536870912}"#)), "nothing is promised in vain");
    }

    #[test]
    fn a_copy_has_the_limits_and_the_tenant_of_its_source() {
        let source = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let checkpoint_id = CheckpointId::new(&source, 1, 1, &Nonce::from_bits([1; 16]));
        let limits = Limits { pids: Some(64), ..Limits::default() };
        let config = SandboxConfig {
            from_checkpoint: Some(checkpoint_id.clone()),
            limits: limits.clone(),
            ..SandboxConfig::default()
        };
        assert_eq!(refused(config, ALL), LIMITED_ALREADY);
        let tenant = "team-a".parse().ok();
        let original = Spec { limits: limits.clone(), tenant, ..spec() };
        let copied = copy(&original, &checkpoint_id, source, String::new(), String::new());
        assert_eq!((copied.limits, copied.tenant), (limits, original.tenant));
    }

    #[test]
    fn nothing_is_written_over_deleted() {
        let mut spec = spec();
        spec.desired_state = DesiredState::Deleted;
        assert!(!attach(&mut spec, &there(), true, false));
        assert!(!desire(&mut spec, DesiredState::Checkpointed));
        assert!(!revert_checkpoint(&mut spec, &here()));
        assert_eq!(spec.desired_state, DesiredState::Deleted);
    }

    fn there() -> InstanceId {
        InstanceId::from_bits([2; 16])
    }

    fn of_the_documents() -> Spec {
        Spec { plain: Some(PlainWords::Documents), ..spec() }
    }

    fn of_the_predecessor() -> Spec {
        Spec { plain: Some(PlainWords::Predecessor), ..spec() }
    }

    #[test]
    fn an_attach_writes_only_what_is_not_so_already() {
        let mut spec = of_the_documents();
        assert!(!attach(&mut spec, &here(), false, false), "its own client has made it");
        spec.desired_state = DesiredState::HandedOff;
        assert!(attach(&mut spec, &here(), false, false));
        assert!(attach(&mut spec, &there(), false, false));
        assert_eq!(spec.placement, Some(there()));
        assert_eq!(spec.claim, Some(Claimed { instance: there(), kind: Claim::Ask }));
        assert!(attach(&mut spec, &there(), true, false), "it claims more than before");
        assert_eq!(spec.claim, Some(Claimed { instance: there(), kind: Claim::Preempt }));
        spec.desired_state = DesiredState::Deleted;
        assert!(!attach(&mut spec, &here(), true, true));
    }

    #[test]
    fn a_visit_never_claims_more_than_a_plain_client_and_never_less_than_what_is_claimed() {
        for mut spec in [of_the_documents(), of_the_predecessor()] {
            assert!(visit(&mut spec, &there(), false));
            assert_eq!(spec.claim, Some(Claimed { instance: there(), kind: Claim::Ask }));
            assert!(!visit(&mut spec, &there(), false));
            assert!(attach(&mut spec, &there(), true, false));
            assert!(!visit(&mut spec, &there(), false), "a client of this instance claims more");
            spec.desired_state = DesiredState::Checkpointed;
            assert!(visit(&mut spec, &there(), false), "it wakes");
            assert_eq!(spec.desired_state, DesiredState::Running);
            spec.desired_state = DesiredState::Deleted;
            assert!(!visit(&mut spec, &here(), false));
        }
    }

    #[test]
    fn who_speaks_v1_and_who_comes_to_a_sandbox_of_the_predecessor_wins_at_once() {
        for (spec, is_v1, wins) in [
            (of_the_documents(), false, false),
            (of_the_documents(), true, true),
            (of_the_predecessor(), false, true),
            (of_the_predecessor(), true, true),
        ] {
            assert_eq!(preempts(&spec, is_v1), wins);
            let mut spec = spec;
            assert!(attach(&mut spec, &there(), is_v1, false));
            assert_eq!(spec.claim.unwrap().kind == Claim::Preempt, wins);
        }
    }

    #[test]
    fn an_attach_where_it_is_leaves_an_order_to_elsewhere_as_it_is() {
        let mut ordered = spec();
        ordered.placement = Some(there());
        let mut spec = ordered.clone();
        assert!(!attach(&mut spec, &here(), true, true));
        assert_eq!(spec, ordered);
        assert!(attach(&mut spec, &here(), true, false), "what is not here has to be asked for");
        let mut spec = ordered.clone();
        spec.desired_state = DesiredState::HandedOff;
        assert!(attach(&mut spec, &here(), true, true), "it would leave, and nobody would take it yet");
    }

    #[test]
    fn only_the_own_request_is_given_back_to_the_holder() {
        let mut asked = of_the_documents();
        assert!(attach(&mut asked, &there(), false, false));
        let mut spec = asked.clone();
        assert!(give_back(&mut spec, &there(), &here()));
        assert_eq!((spec.placement.as_ref(), spec.open_order()), (Some(&here()), None));
        assert!(!give_back(&mut spec, &there(), &here()), "once");
        for change in [
            |spec: &mut Spec| spec.placement = Some(InstanceId::from_bits([3; 16])),
            |spec: &mut Spec| spec.claim = None,
            |spec: &mut Spec| spec.claim = Some(Claimed { instance: there(), kind: Claim::Order }),
        ] {
            let mut spec = asked.clone();
            change(&mut spec);
            let before = spec.clone();
            assert!(!give_back(&mut spec, &there(), &here()));
            assert_eq!(spec, before);
        }
    }

    #[test]
    fn only_the_own_request_is_reverted() {
        let mut spec = spec();
        assert!(!revert_checkpoint(&mut spec, &here()), "somebody wants it running already");
        spec.desired_state = DesiredState::Checkpointed;
        assert!(!revert_checkpoint(&mut spec, &InstanceId::from_bits([2; 16])), "it is wanted elsewhere");
        assert!(revert_checkpoint(&mut spec, &here()));
        assert_eq!(spec.desired_state, DesiredState::Running);
    }

    #[test]
    fn a_checkpoint_needs_the_server_the_sandbox_and_silence() {
        let mut spec = spec();
        let told = |spec: &Spec, live, running, can| checkpoint(spec, live, running, can).map_err(|no| no.status);
        assert_eq!(told(&spec, false, false, ALL), Err(Status::CheckpointError));
        spec.enable_sandbox_checkpoint = true;
        assert_eq!(told(&spec, false, false, NONE), Err(Status::CheckpointError));
        assert_eq!(told(&spec, false, true, ALL), Err(Status::ExecutionInProgressError));
        assert_eq!(told(&spec, true, true, ALL), Ok(()));
        assert_eq!(told(&spec, false, false, ALL), Ok(()));
    }
}
