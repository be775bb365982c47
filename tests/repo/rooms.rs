//! The rooms: who may use whom. Reads the paths that every source file names and fails with
//! the rule that was broken. Test modules are free.

use crate::{
    repo_files::{read, rust_files},
    rust_source,
};

/// What every room may use.
const COMMON: [&str; 6] = ["clock", "config", "fair_watch", "metrics", "telemetry", "traces"];

struct Room {
    name: &'static str,
    /// Other rooms it may use.
    uses: &'static [&'static str],
    /// Parts of those that are not for it, and crates.
    never: &'static [&'static [&'static str]],
    rule: &'static str,
}

/// The half of the runtime that makes and ends containers, as `runtime/mod.rs` shows it.
const LIFECYCLE: &[&[&str]] = &[
    &["crate", "runtime", "Lifecycle"],
    &["crate", "runtime", "Start"],
    &["crate", "runtime", "Facts"],
    &["crate", "runtime", "Seen"],
    &["crate", "runtime", "Container"],
    &["crate", "runtime", "runsc"],
];

const ROOMS: &[Room] = &[
    Room {
        name: "storage",
        uses: &[],
        never: &[],
        rule: "storage uses protocol and the way to the bucket, and never api, reconciler or runtime",
    },
    Room {
        name: "runtime",
        uses: &["guard", "network"],
        never: &[],
        rule: "runtime uses protocol, network and what the guard speaks, and never api, reconciler or storage",
    },
    Room {
        name: "network",
        uses: &[],
        never: &[],
        rule: "network uses protocol alone: it knows frames and sockets, and no container or record",
    },
    Room {
        name: "bus",
        uses: &["storage"],
        never: &[],
        rule: "bus connects api and reconciler on one instance, and never uses either, or the runtime",
    },
    Room {
        name: "reconciler",
        uses: &["bus", "storage", "runtime", "network"],
        never: &[&["crate", "runtime", "AgentLinks"], &["crate", "runtime", "Link"], &["crate", "runtime", "runsc"]],
        rule: "reconciler uses bus, storage and the lifecycle half of runtime, and never api or the exec half",
    },
    Room {
        name: "api",
        uses: &["bus", "storage", "runtime", "network"],
        never: LIFECYCLE,
        rule: "api uses bus, storage, network and the exec half of runtime, and never reconciler or the lifecycle half",
    },
    Room {
        name: "guard",
        uses: &[],
        never: &[&["tokio"]],
        rule: "guard uses nothing: it is a process of its own with a tiny protocol, and never tokio",
    },
    Room {
        name: "ipc",
        uses: &["bus", "storage", "runtime", "network"],
        never: &[&["crate", "runtime", "runsc"]],
        rule: "ipc carries what passes between api and reconciler, and never uses either",
    },
    Room { name: "clock", uses: &[], never: &[], rule: "clock uses protocol alone: everybody uses it" },
    Room { name: "fair_watch", uses: &[], never: &[], rule: "fair_watch uses no room: everybody uses it" },
    Room { name: "config", uses: &[], never: &[], rule: "config uses no room: every room is given what it needs" },
    Room { name: "metrics", uses: &[], never: &[], rule: "metrics uses no room: every room tells it what happened" },
    Room { name: "traces", uses: &[], never: &[], rule: "traces uses no room: every room tells it what happened" },
    Room { name: "telemetry", uses: &[], never: &[], rule: "telemetry uses no room" },
];

/// Files of these names decide and do nothing else.
const PURE: [&str; 13] = [
    "plan",
    "desired",
    "precedence",
    "intent",
    "argv",
    "bundle",
    "layout",
    "rules",
    "admission_rules",
    "pool_rules",
    "sweep_rules",
    "address_rules",
    "egress_rules",
];
const PURE_RULE: &str = "is a pure file: no async, clock, randomness or I/O (a `Moment` is only a number)";
const IMPURE: [&str; 9] =
    ["async", "await", "Instant", "SystemTime", "SystemClock", "SharedClock", "getrandom", "println", "eprintln"];
/// Crates and modules that reach outside the program.
const OUTSIDE: [&[&str]; 9] = [
    &["tokio"],
    &["tracing"],
    &["rand"],
    &["std", "fs"],
    &["std", "net"],
    &["std", "process"],
    &["std", "env"],
    &["std", "io"],
    &["std", "thread"],
];

const PROTOCOL_RULE: &str = "crates/protocol uses serde and no I/O, clock or randomness: it is what everybody shares";

/// What is wrong with a file of this path, in sentences.
fn broken(path: &str, text: &str) -> Vec<String> {
    let code = rust_source::code(text);
    let module = module_of(path);
    let paths = rust_source::paths(&code, &module);
    let mut sentences = Vec::new();
    if let Some(room) =
        ROOMS.iter().find(|room| path.starts_with("src/") && module.first().is_some_and(|m| m == room.name))
    {
        for named in paths.iter().filter(|named| !room.allows(named)) {
            sentences.push(format!("{path} names {}, but {}", named.join("::"), room.rule));
        }
    }
    let stem = module.last().map_or("", String::as_str);
    if path.starts_with("src/") && PURE.contains(&stem) {
        for word in code.iter().filter(|word| IMPURE.contains(&word.as_str())) {
            sentences.push(format!("{path} says `{word}`, but it {PURE_RULE}"));
        }
        for named in paths.iter().filter(|named| is_outside(named)) {
            sentences.push(format!("{path} names {}, but it {PURE_RULE}", named.join("::")));
        }
    }
    if path.starts_with("crates/protocol/src/") {
        for named in paths.iter().filter(|named| is_outside(named)) {
            sentences.push(format!("{path} names {}, but {PROTOCOL_RULE}", named.join("::")));
        }
    }
    sentences
}

impl Room {
    fn allows(&self, named: &[String]) -> bool {
        if self.never.iter().any(|never| begins(named, never)) {
            return false;
        }
        // The way to the bucket is through a store.
        if begins(named, &["baton_gcs"]) && self.name != "storage" {
            return false;
        }
        let [first, other, ..] = named else { return true };
        first != "crate"
            || other == self.name
            || COMMON.contains(&other.as_str())
            || self.uses.contains(&other.as_str())
            // A type or function of the crate's root belongs to no room; there is none today.
            || !is_room(other)
    }
}

fn begins(named: &[String], with: &[&str]) -> bool {
    named.len() >= with.len() && named.iter().zip(with).all(|(a, b)| a == b)
}

fn is_outside(named: &[String]) -> bool {
    OUTSIDE.iter().any(|path| begins(named, path))
}

fn is_room(name: &str) -> bool {
    name == "cli" || ROOMS.iter().any(|room| room.name == name)
}

/// `src/api/session.rs` is the module `api::session`.
fn module_of(path: &str) -> Vec<String> {
    let inside = path.rsplit_once("src/").map_or(path, |(_, inside)| inside);
    let inside = inside.trim_end_matches(".rs").trim_end_matches("/mod");
    inside.split('/').filter(|name| !["lib", "main"].contains(name)).map(str::to_owned).collect()
}

#[test]
fn every_room_keeps_to_itself_and_pure_files_stay_pure() {
    let files: Vec<_> = ["src", "crates/protocol/src"].into_iter().flat_map(rust_files).collect();
    assert!(files.len() > 10, "the sources were not found");
    let files = files.iter().filter(|path| !path.ends_with("/tests.rs"));
    let broken: Vec<_> = files.flat_map(|path| broken(path, &read(path))).collect();
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn the_rooms_of_the_diagram_exist() {
    let text = read("src/lib.rs");
    for line in text.lines().filter_map(|line| line.strip_prefix("pub mod ")) {
        assert!(is_room(line.trim_end_matches(';')), "{line} has no rule: say in tests/repo/rooms.rs whom it may use");
    }
}

#[test]
fn a_path_into_a_forbidden_room_is_found_however_it_is_written() {
    for text in [
        "use crate::reconciler::ReconcilerContext;",
        "use crate::{clock::Moment, reconciler};",
        "use crate::{clock::{Moment, SharedClock}, bus, reconciler::{self, plan::plan}};",
        "use super::super::reconciler::plan;",
        "fn f() { crate::reconciler::run() }",
        "pub(crate) use crate::reconciler as r;",
        "impl crate::reconciler::X for Y {}",
        "fn f(x: &'static str) -> crate::reconciler::X { 'a'; '\\''; g(\"\\\"\") }",
    ] {
        let found = broken("src/api/session.rs", text);
        assert!(!found.is_empty() && found.iter().all(|s| s.contains("never reconciler")), "{text}: {found:?}");
    }
}

#[test]
fn what_is_allowed_commented_quoted_or_a_test_is_no_breach() {
    for text in [
        "use crate::{api::token, clock::Moment, bus::Bus, runtime::{AgentLinks, Link}};",
        "// use crate::reconciler::ReconcilerContext;",
        "/* /* crate::reconciler::X */ crate::reconciler::Y */",
        "const TEXT: &str = \"crate::reconciler::X\";",
        "const TEXT: &str = r#\"a \" crate::reconciler::X\"#;",
        "#[cfg(test)]\nmod tests { use crate::reconciler::ReconcilerContext; fn f() { if x { y } } }",
        "#[cfg(test)]\nuse crate::reconciler::ReconcilerContext;",
        "use super::token::Token; use self::inner::X;",
    ] {
        assert_eq!(broken("src/api/session.rs", text), [""; 0], "{text}");
    }
}

#[test]
fn each_half_of_the_runtime_is_for_one_room_and_so_is_the_bucket() {
    assert_eq!(broken("src/api/mod.rs", "use crate::runtime::{AgentLinks, Lifecycle};").len(), 1);
    assert_eq!(broken("src/api/mod.rs", "use crate::{clock, runtime}; fn f(x: &dyn runtime::Lifecycle) {}").len(), 1);
    assert_eq!(broken("src/reconciler/actions.rs", "use crate::runtime::{AgentLinks, Lifecycle};").len(), 1);
    assert_eq!(broken("src/storage/mod.rs", "use crate::runtime::Lifecycle;").len(), 1);
    assert_eq!(broken("src/runtime/mod.rs", "use crate::{guard::wire, storage::records};").len(), 1);
    assert_eq!(broken("src/guard/guard_wire.rs", "use tokio::io::AsyncRead;").len(), 1);
    assert_eq!(broken("src/storage/gcs/mod.rs", "use baton_gcs::Client;").len(), 0);
    assert_eq!(broken("src/reconciler/actions.rs", "use baton_gcs::Client;").len(), 1);
    assert_eq!(broken("src/main.rs", "use crate::{api, reconciler, runtime::Lifecycle};").len(), 0);
}

#[test]
fn a_pure_file_that_waits_asks_the_time_or_touches_the_world_is_found() {
    for text in [
        "async fn plan() {}",
        "use std::fs;",
        "fn now() { std::time::Instant::now() }",
        "use crate::clock::SharedClock;",
        "fn f() { println!(\"x\") }",
    ] {
        let found = broken("src/reconciler/plan.rs", text);
        assert!(!found.is_empty() && found[0].contains("pure file"), "{text}: {found:?}");
    }
    let pure = "use crate::clock::Moment; /// async\nfn plan(spec: &Spec) { spec.env; spec.process }";
    assert_eq!(broken("src/reconciler/plan.rs", pure), [""; 0]);
    assert_eq!(broken("src/reconciler/actions.rs", "async fn act() {}"), [""; 0]);
}

#[test]
fn the_protocol_crate_does_no_io() {
    for text in ["use std::fs::File;", "use tokio::sync::mpsc;", "fn f() { std::env::args() }", "use std::{fmt, io};"] {
        assert_eq!(broken("crates/protocol/src/frame.rs", text).len(), 1, "{text}");
    }
    assert_eq!(broken("crates/protocol/src/frame.rs", "use std::{fmt, time::Duration};"), [""; 0]);
}
