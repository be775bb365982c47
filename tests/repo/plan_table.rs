//! `docs/plan.md` is the planner's table, worked out over its whole state space.

use std::{collections::BTreeMap, env, fmt::Write, fs, path::Path};

use baton::{
    reconciler::plan::{Action, AttachState, Desired, LockState, Observed, Saved, Upkeep, plan},
    runtime::Container,
};

/// A standing, a container, and the actions with their conditions.
type Place = (usize, usize, Vec<(String, String)>);

const FLAGS: [&str; 9] = [
    "checkpointable",
    "may wait",
    "checkpoint requested",
    "snapshot requested",
    "rootfs missing",
    "registered",
    "waiting",
    "declines",
    "refused",
];

/// What decides within one cell: what is saved, and the flags.
type Rest = (usize, u16);

fn observed(lock: LockState, container: Container, (saved, flags): Rest) -> Observed {
    let flag = |n: u16| flags >> n & 1 == 1;
    Observed {
        lock,
        container,
        saved: Saved::ALL[saved],
        checkpointable: flag(0),
        may_wait: flag(1),
        checkpoint_requested: flag(2),
        snapshot_requested: flag(3),
        rootfs_missing: flag(4),
        registered: flag(5),
        waiting: flag(6),
        declines: flag(7),
        refused: flag(8),
        attachment: AttachState::Waiting,
        due: None,
        deferred: None,
    }
}

fn all_of_the_rest() -> impl Iterator<Item = Rest> {
    (0..Saved::ALL.len()).flat_map(|saved| (0..1u16 << FLAGS.len()).map(move |flags| (saved, flags)))
}

/// Every action of a cell, with the states that lead to it, in the order they are met.
fn cell(standing: LockState, container: Container, desired: Desired) -> Vec<(Action, Vec<Rest>)> {
    let mut found: Vec<(Action, Vec<Rest>)> = Vec::new();
    for rest in all_of_the_rest() {
        let action = plan(desired, &observed(standing, container, rest));
        match found.iter_mut().find(|(known, _)| *known == action) {
            Some((_, states)) => states.push(rest),
            None => found.push((action, vec![rest])),
        }
    }
    found
}

fn names(cell: &[(Action, Vec<Rest>)]) -> String {
    cell.iter().map(|(action, _)| format!("{action:?}")).collect::<Vec<_>>().join(" · ")
}

/// What all of some states have in common.
struct Common {
    /// Flags and the value they have.
    flags: Vec<(usize, bool)>,
    saved: Vec<usize>,
}

impl Common {
    fn of(states: &[Rest]) -> Self {
        let flags = (0..FLAGS.len()).filter_map(|bit| {
            let set = states.iter().filter(|(_, flags)| flags >> bit & 1 == 1).count();
            (set == states.len() || set == 0).then_some((bit, set > 0))
        });
        let saved = (0..Saved::ALL.len()).filter(|at| states.iter().any(|(saved, _)| saved == at));
        Self { flags: flags.collect(), saved: saved.collect() }
    }

    fn holds(&self, (saved, flags): &Rest) -> bool {
        self.saved.contains(saved) && self.flags.iter().all(|(bit, set)| (flags >> bit & 1 == 1) == *set)
    }

    /// In words, without what is true anyway.
    fn words(&self, anyway: &Self) -> String {
        let flags = self.flags.iter().filter(|flag| !anyway.flags.contains(flag));
        let mut words: Vec<_> =
            flags.map(|(bit, set)| format!("{}{}", if *set { "" } else { "not " }, FLAGS[*bit])).collect();
        if self.saved != anyway.saved {
            let saved: Vec<_> = self.saved.iter().map(|at| format!("{:?}", Saved::ALL[*at])).collect();
            words.push(format!("saved: {}", saved.join(" or ")));
        }
        if words.is_empty() { "otherwise".to_owned() } else { words.join(", ") }
    }
}

/// The actions of a cell, in an order in which the first whose condition holds is the one.
fn decisions(mut cell: Vec<(Action, Vec<Rest>)>) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    while !cell.is_empty() {
        let left: Vec<Rest> = cell.iter().flat_map(|(_, states)| states.clone()).collect();
        let tells = |(_, states): &(Action, Vec<Rest>)| {
            let common = Common::of(states);
            left.iter().filter(|rest| common.holds(rest)).count() == states.len()
        };
        let at = cell.iter().position(tells).expect("one condition at a time decides");
        let (action, states) = cell.remove(at);
        lines.push((format!("{action:?}"), Common::of(&states).words(&Common::of(&left))));
    }
    lines
}

fn document() -> String {
    let mut page = String::from(
        "# The plan\n\n\
         From the lock as one instance sees it, its container and the desired state to the next action, while a\n\
         session waits and no upkeep is due. This page is generated from `src/reconciler/plan.rs`; `make docs` writes\n\
         it again.\n\n",
    );
    let _ = writeln!(page, "| lock | container | {} |", Desired::ALL.map(|desired| format!("{desired:?}")).join(" | "));
    let _ = writeln!(page, "|---|---|{}", "---|".repeat(Desired::ALL.len()));
    for standing in LockState::ALL {
        // Containers with which the same is done share a row.
        let mut rows: Vec<(Vec<String>, Vec<String>)> = Vec::new();
        for container in Container::ALL {
            let cells: Vec<_> =
                Desired::ALL.iter().map(|desired| names(&cell(standing, container, *desired))).collect();
            match rows.iter_mut().find(|(_, known)| *known == cells) {
                Some((containers, _)) => containers.push(format!("{container:?}")),
                None => rows.push((vec![format!("{container:?}")], cells)),
            }
        }
        for (containers, cells) in rows {
            let containers =
                if containers.len() == Container::ALL.len() { "any".to_owned() } else { containers.join(", ") };
            let _ = writeln!(page, "| {standing:?} | {containers} | {} |", cells.join(" | "));
        }
    }
    page.push_str("\nWhere a cell names several actions, the first whose condition holds is the one:\n\n| lock | container | desired | action | when |\n|---|---|---|---|---|\n");
    let mut merged: BTreeMap<Place, Vec<String>> = BTreeMap::new();
    for (s, standing) in LockState::ALL.into_iter().enumerate() {
        for (c, container) in Container::ALL.into_iter().enumerate() {
            for desired in Desired::ALL {
                let cell = cell(standing, container, desired);
                if cell.len() > 1 {
                    merged.entry((s, c, decisions(cell))).or_default().push(format!("{desired:?}"));
                }
            }
        }
    }
    for ((s, c, lines), wanted) in merged {
        for (action, when) in lines {
            let (standing, container) = (LockState::ALL[s], Container::ALL[c]);
            let _ = writeln!(page, "| {standing:?} | {container:?} | {} | {action} | {when} |", wanted.join(", "));
        }
    }
    page.push_str(
        "\nThe holder does what has become due before anything else in the table, but collects garbage only when it\n\
         would rest. A sandbox that is being deleted needs only renewals:\n\n| due | action |\n|---|---|\n",
    );
    for upkeep in Upkeep::ALL {
        let _ = writeln!(page, "| {upkeep:?} | {:?} |", upkeep.action());
    }
    page.push_str(
        "\nA session that waits for a sandbox without a container here is refused when:\n\n\
         | attachment | lock | desired | action |\n|---|---|---|---|\n",
    );
    for attachment in AttachState::ALL {
        for lock in [LockState::Free, LockState::Theirs] {
            let refused: Vec<_> = Desired::ALL
                .into_iter()
                .filter_map(|desired| {
                    let seen = Observed { attachment, ..observed(lock, Container::Absent, (0, 0)) };
                    let Action::Refuse(rejection) = plan(desired, &seen) else { return None };
                    Some((format!("{rejection:?}"), format!("{desired:?}")))
                })
                .collect();
            let mut by_rejection: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for (rejection, desired) in refused {
                by_rejection.entry(rejection).or_default().push(desired);
            }
            for (rejection, desired) in by_rejection {
                let desired = if desired.len() == Desired::ALL.len() { "any".to_owned() } else { desired.join(", ") };
                let _ = writeln!(page, "| {attachment:?} | {lock:?} | {desired} | Refuse({rejection}) |");
            }
        }
    }
    page
}

#[test]
fn the_page_of_the_plan_is_what_the_planner_does() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/plan.md");
    if env::var_os("BATON_WRITE_DOCS").is_some() {
        fs::write(&path, document()).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == document(), "docs/plan.md is not what the planner does: run `make docs`");
}
