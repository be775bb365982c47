//! The suite that every client library runs, for the Rust one: real servers, real sandboxes, a bad
//! network. `clients/suite` lists the scenarios, and has the test bed for them.

mod commands;
mod library_ends;
mod library_files;
mod library_input;
mod library_moves;
mod library_roll_back;
mod library_watch;
mod network;
mod testbed;

use std::time::Duration;

use baton_client::{Chunk, Connection, Exec, Language, Options, OutputStream, Running, Sandbox, SandboxConfig};

use self::testbed::{Proxy, Testbed, cases};

/// One scenario: a test bed with server `a`, a network before it, and a sandbox behind that.
struct Scene {
    testbed: Testbed,
    proxy: Proxy,
    sandbox: Sandbox,
}

impl Scene {
    async fn new() -> Self {
        Self::with(Options::default()).await
    }

    async fn with(options: Options) -> Self {
        let mut testbed = Testbed::start().await;
        let proxy = testbed.proxy("a").await;
        let sandbox = Sandbox::create(&proxy.url, options).await.unwrap();
        Self { testbed, proxy, sandbox }
    }

    async fn end(self) {
        self.sandbox.kill().await.unwrap();
        self.testbed.end().await;
    }
}

fn persistent() -> Options {
    let config =
        SandboxConfig { enable_checkpoint: true, enable_sandbox_handoff: Some(true), ..SandboxConfig::default() };
    Options { config, ..Options::default() }
}

fn bash(code: &str) -> Exec {
    Exec::code(Language::Bash, code)
}

fn tick(count: u32) -> Exec {
    bash(&format!("for i in $(seq 1 {count}); do echo line $i; sleep 0.05; done; exit 7"))
}

fn ticks(count: u32) -> String {
    (1..=count).map(|number| format!("line {number}\n")).collect()
}

/// Reads until the text is there; all that was read.
async fn until(stdout: &mut OutputStream, text: &str) -> String {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(text) {
        match stdout.next().await {
            Some(Chunk::Data(bytes)) => seen.extend_from_slice(&bytes),
            other => panic!("{other:?} instead of {text:?}, after {:?}", String::from_utf8_lossy(&seen)),
        }
    }
    String::from_utf8(seen).unwrap()
}

/// The rest of it.
async fn rest(stdout: &mut OutputStream) -> String {
    let mut seen = Vec::new();
    while let Some(chunk) = stdout.next().await {
        match chunk {
            Chunk::Data(bytes) => seen.extend_from_slice(&bytes),
            other => panic!("{other:?}"),
        }
    }
    String::from_utf8(seen).unwrap()
}

fn taken(running: &mut Running) -> OutputStream {
    running.take_stdout().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Where each connection ends, a little later than the one before.
fn cuts(size: u64, count: u64) -> Vec<u64> {
    (0..count).map(|number| size / (count + 2) + number * 997).collect()
}

fn impatient(silence: Duration) -> Options {
    Options { connection: Connection { silence, ..Connection::default() }, ..Options::default() }
}

/// A test for each scenario, none of which hangs.
macro_rules! scenarios {
    ($($name:ident in $room:ident),* $(,)?) => {
        /// The names in `clients/suite/cases.json`, as functions are named.
        const HERE: &[&str] = &[$(stringify!($name)),*];

        $(#[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            let permit = crate::fixture::permit().await;
            let longest = Duration::from_secs(if crate::servers::is_proof() { 1800 } else { 180 });
            crate::fixture::clock().timeout(longest, $room::$name()).await.expect("it hangs");
            drop(permit);
        })*
    };
}

scenarios! {
    commands_end_as_the_table_says in commands,
    what_cannot_start_is_refused in commands,
    output_comes_while_the_command_runs in commands,
    commands_run_side_by_side in commands,
    input_is_taken_as_it_is_written in commands,
    a_command_is_killed_and_another_gets_a_signal in commands,
    check_raises_what_a_command_said in commands,
    output_is_exact_over_many_cuts in network,
    input_is_exact_over_many_cuts in network,
    input_after_an_attach_is_exact in library_input,
    input_after_that_of_another_client_is_exact in library_input,
    a_slow_network_changes_nothing in network,
    a_stalled_connection_is_given_up_and_taken_up_again in network,
    a_command_outlives_sigterm_of_its_server in library_moves,
    a_command_outlives_a_handoff in library_moves,
    a_checkpoint_is_attached_again_with_its_running_command in library_moves,
    a_checkpoint_that_is_refused_leaves_the_command_running in library_moves,
    a_roll_back_is_loud in library_roll_back,
    errors_have_their_types in library_moves,
    the_end_of_the_sandbox_ends_what_waits_on_it in library_moves,
    ends_are_told_apart in library_ends,
    sandboxes_are_listed_and_killed_by_id in library_ends,
    files_go_in_and_out in library_files,
    a_directory_goes_in_and_out in library_files,
    files_are_exact_over_cuts in library_files,
    a_snapshot_starts_another_sandbox in library_moves,
    a_fork_goes_on_where_its_source_was in library_moves,
}

#[test]
fn every_scenario_is_here() {
    let names = cases()["scenarios"].as_array().unwrap().clone();
    let function = |name: &str| {
        name.to_lowercase().split([' ', ',', '-']).filter(|word| !word.is_empty()).collect::<Vec<_>>().join("_")
    };
    let names: Vec<_> = names.iter().map(|name| function(name.as_str().unwrap())).collect();
    assert_eq!(names, HERE);
}
