//! The recipes of docs/operate.md, each carried out as it stands there, and what becomes of the world.

use std::{fs, path::Path, process::Stdio, time::Duration};

use serde_json::{Value, json};
use tokio::process::Command;

use crate::{
    fixture::{clock, eventually},
    live_handoff::movable,
    server_crash::SCALED,
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Socket},
};

/// The token whose hash stands on the page.
const NEW_TOKEN: &str = "password";

/// Every recipe: its title and its commands, in order.
fn recipes() -> Vec<(String, Vec<String>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operate.md");
    let page = fs::read_to_string(path).unwrap();
    let (_, recipes) = page.split_once("\n## Recipes\n").expect("a chapter of recipes");
    let mut found = Vec::new();
    for recipe in recipes.split("\n### ").skip(1) {
        let (title, text) = recipe.split_once('\n').unwrap();
        // What is shown as JSON is a file, not a command.
        let blocks = text.split("```").skip(1).step_by(2).filter(|block| !block.starts_with("json"));
        let commands = blocks.flat_map(str::lines).filter(|line| !line.is_empty()).map(str::to_owned).collect();
        found.push((title.to_owned(), commands));
    }
    found
}

/// The record that stands on the page, for who restores a sandbox by hand.
fn shown_record() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operate.md");
    let page = fs::read_to_string(path).unwrap();
    let (_, block) = page.split_once("```json").expect("a record is shown");
    block.split_once("```").unwrap().0.to_owned()
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

struct World {
    machine: Machine,
    server: Server,
}

impl World {
    /// Does what a line says, with more variables than the operator's own.
    async fn does_with(&self, line: &str, id: &str, more: &[(&str, &str)]) -> Ran {
        let mut words = line.split_whitespace().peekable();
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.env_clear().env("PATH", "/usr/bin:/bin").envs(self.machine.place()).envs(SCALED);
        while let Some((name, value)) = words.peek().and_then(|word| word.split_once('=')) {
            command.env(name, value);
            words.next();
        }
        assert_eq!(words.next(), Some("baton"), "{line}");
        command.args(words.map(|word| if word == "ID" { id } else { word })).envs(more.iter().copied());
        if line.starts_with("baton watch") {
            // Whoever follows the recipe ends it with Ctrl-C.
            command.args(["--for", "1s"]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let output = clock().timeout(Duration::from_secs(90), command.output()).await;
        let output = output.unwrap_or_else(|_| panic!("{line} does not end")).unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Does what a line says; it must work.
    async fn does(&self, line: &str, id: &str) -> String {
        let Ran { code, out, err } = self.does_with(line, id, &[]).await;
        assert_eq!(code, Some(0), "{line}: {out}{err}");
        out
    }

    async fn running(&self) -> (Socket, Key) {
        Socket::create(&self.server, Dialect::Plain, movable()).await
    }

    async fn stored(&self) -> Key {
        let (mut socket, key) = self.running().await;
        socket.send(json!({"action": "checkpoint"})).await;
        socket.status("CHECKPOINTED").await;
        socket.end().await;
        let id = &key.id;
        eventually("its status says so", || self.metadata(id)["status"]["phase"] == "checkpointed").await;
        key
    }

    fn metadata(&self, id: &str) -> Value {
        self.machine.json(&format!("sandboxes/{id}/metadata.json"))
    }

    fn lose(&self, id: &str, object: &str) {
        fs::remove_file(self.machine.data().join(format!("sandboxes/{id}/{object}"))).unwrap();
    }

    fn is_free(&self, id: &str) -> bool {
        self.machine.lock(id)["lease"].is_null()
    }
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_recipe_does_what_it_says() {
    let machine = Machine::with_a_directory().await;
    let settings = [SCALED[0], ("BATON_SWEEP", "1s")];
    let server = machine.server_with("a", &settings).await;
    let world = World { machine, server };
    let recipes = recipes();
    assert!(recipes.len() >= 12, "only {} recipes were found", recipes.len());
    for (title, commands) in &recipes {
        println!("{title}");
        carry_out(&world, title, commands).await;
    }
    world.server.stop().await;
}

async fn carry_out(world: &World, title: &str, commands: &[String]) {
    let all: Vec<_> = commands.iter().map(String::as_str).collect();
    match (title, &all[..]) {
        ("A sandbox is stuck", [get, explain, watch, handoff, checkpoints, rollback]) => {
            // Its checkpoints have one file more than others.
            let mut with_files = movable();
            with_files["on_incompatible"] = json!("files");
            let (mut socket, Key { id, .. }) = Socket::create(&world.server, Dialect::Plain, with_files).await;
            world.does("baton checkpoint --keep-running ID", &id).await;
            let first = world.machine.lock(&id)["head"]["checkpoint_id"].clone();
            assert!(world.does(get, &id).await.contains("running"));
            assert!(world.does(explain, &id).await.contains("CheckpointFailed"));
            assert!(world.does(watch, &id).await.contains(&id));
            world.does(handoff, &id).await;
            assert_eq!(socket.end().await, Some(1012));
            assert!(world.is_free(&id));
            let head = world.machine.lock(&id)["head"]["checkpoint_id"].clone();
            assert!(world.does(checkpoints, &id).await.contains(head.as_str().unwrap()) && head != first);
            world.does(rollback, &id).await;
            assert_eq!(world.machine.lock(&id)["head"]["checkpoint_id"], first);
            world.does(rollback, &id).await;
            assert_eq!(world.machine.lock(&id)["head"]["checkpoint_id"], head, "and forward again");
        }
        ("An instance died", [list, get, explain, handoff]) => {
            let mut other = world.machine.server_with("b", &SCALED).await;
            let (socket, Key { id, .. }) = Socket::create(&other, Dialect::Plain, movable()).await;
            world.does("baton checkpoint --keep-running ID", &id).await;
            other.die().await;
            drop(socket);
            let shown = async { while !world.does(list, "").await.contains(&id) {} };
            clock().timeout(Duration::from_secs(60), shown).await.expect("it is shown");
            assert!(world.does(get, &id).await.contains("unresponsive"));
            assert!(world.does(explain, "").await.contains("Unresponsive"));
            world.does(handoff, &id).await;
            assert!(world.is_free(&id));
        }
        ("The bucket cannot be reached", [check]) => {
            world.does(check, "").await;
            let nowhere = [("BATON_GCS_ENDPOINT", "http://127.0.0.1:9"), ("SANDBOX_METADATA_BUCKET", "b")];
            let Ran { code, out, err } = world.does_with(check, "", &nowhere).await;
            assert!(code == Some(1) && format!("{out}{err}").contains("metadata"), "{code:?} {out}{err}");
        }
        ("An object was deleted", [orphans, repair, repair_lock]) => {
            let (one, two) = (world.stored().await, world.stored().await);
            world.lose(&one.id, "metadata.json");
            assert!(world.does(orphans, "").await.contains(&one.id));
            let said = world.does(repair, &one.id).await;
            let token = said.trim().rsplit(' ').next().unwrap().to_owned();
            let mut socket = Socket::attach(&world.server, Dialect::Plain, &Key { token, ..one }).await;
            socket.status("RUNNING").await;
            socket.kill().await;
            world.lose(&two.id, "lock.json");
            world.does(repair_lock, &two.id).await;
            let mut socket = Socket::attach(&world.server, Dialect::Plain, &two).await;
            socket.status("RUNNING").await;
            socket.kill().await;
        }
        ("Restoring a sandbox by hand", [repair]) => {
            let Key { id, .. } = world.stored().await;
            let checkpoint = world.machine.lock(&id)["head"]["checkpoint_id"].as_str().unwrap().to_owned();
            let checkpoints = world.machine.data().join("sandbox_checkpoints");
            fs::create_dir(checkpoints.join("checkpoint-xyz")).unwrap();
            for file in fs::read_dir(checkpoints.join(checkpoint)).unwrap().map(Result::unwrap) {
                fs::copy(file.path(), checkpoints.join("checkpoint-xyz").join(file.file_name())).unwrap();
            }
            let record = json_of(&shown_record());
            let id = record["sandbox_id"].as_str().unwrap().to_owned();
            let sandbox = world.machine.data().join("sandboxes").join(&id);
            fs::create_dir(&sandbox).unwrap();
            fs::write(sandbox.join("metadata.json"), record.to_string()).unwrap();
            let said = world.does(repair, &id).await;
            let token = said.trim().rsplit(' ').next().unwrap().to_owned();
            let mut socket = Socket::attach(&world.server, Dialect::Plain, &Key { id, token }).await;
            socket.status("RUNNING").await;
            socket.kill().await;
        }
        ("Versions differ after a deploy", [failed, explain, checkpoints]) => {
            let key = world.stored().await;
            world.does(failed, "").await;
            assert!(world.does(explain, "").await.contains("OtherRuntime"));
            let listed = json_of(&world.does(checkpoints, &key.id).await);
            let status = json_of(&world.server.get("/status").await.1);
            assert_eq!(listed[0]["runsc"], status["capabilities"]["runsc"], "{listed}");
        }
        ("Draining an instance", [list, handoff, watch]) => {
            let (mut socket, Key { id, .. }) = world.running().await;
            let status = json_of(&world.server.get("/status").await.1);
            let rows = || async { json_of(&world.does(list, "").await) };
            let mine = |rows: &Value| {
                let row = rows.as_array().unwrap().iter().find(|row| row["sandbox_id"] == id.as_str()).cloned();
                row.map(|row| row["instance"].clone())
            };
            while mine(&rows().await).is_none() {}
            assert_eq!(mine(&rows().await), Some(status["instance"].clone()));
            world.does(handoff, &id).await;
            assert_eq!(socket.end().await, Some(1012));
            world.does(watch, &id).await;
            assert!(world.is_free(&id));
        }
        ("Upgrading runsc", [list, checkpoints, edit]) => {
            let Key { id, .. } = world.stored().await;
            assert!(world.does(list, "").await.contains(&id));
            let listed = json_of(&world.does(checkpoints, &id).await);
            assert!(listed[0]["runsc"].is_string(), "{listed}");
            world.does(edit, &id).await;
            assert_eq!(world.metadata(&id)["on_incompatible"], "files");
        }
        ("Keys and their rotation", [api_keys, hmac_keys, sign]) => {
            for (command, name) in [(api_keys, "BATON_API_KEYS"), (hmac_keys, "BATON_HMAC_KEY")] {
                let shown = world.does(command, "").await;
                let line = shown.lines().find(|line| line.starts_with(name)).unwrap();
                assert!(line.contains("(redacted)") && !line.contains("new"), "{line}");
            }
            let Key { id, .. } = world.stored().await;
            let head = world.machine.lock(&id)["head"]["checkpoint_id"].as_str().unwrap().to_owned();
            let seal = format!("sandbox_checkpoints/{head}/seal.hmac");
            assert!(world.machine.object(&seal).is_none());
            world.does(sign, &id).await;
            assert_eq!(world.machine.object(&seal).map(|text| text.len()), Some(64));
        }
        ("Retention", [set, unset, config]) => {
            let Key { id, .. } = world.stored().await;
            world.does(set, &id).await;
            assert_eq!(world.metadata(&id)["ttl"], 2_592_000);
            world.does(unset, &id).await;
            assert_eq!(world.metadata(&id)["ttl"], Value::Null);
            assert!(world.does(config, "").await.contains("30days"));
            world.does("baton edit ID --no-wait --set ttl=1", &id).await;
            let lock = || world.machine.lock(&id)["purged"] == true || !world.metadata(&id)["status"].is_object();
            let gone = || world.machine.object(&format!("sandboxes/{id}/metadata.json")).is_none();
            eventually("the next sweep deletes it", || gone() || lock()).await;
        }
        ("What a held sandbox costs", [config, checkpoints]) => {
            assert!(world.does(config, "").await.contains("75s"));
            let alone = world.does_with("BATON_RENEW=15s baton config", "", &[]).await;
            assert_eq!(alone.code, Some(1), "{}", alone.out);
            assert!(alone.err.contains("BATON_HOLD"), "the rule is named: {}", alone.err);
            let Key { id, .. } = world.stored().await;
            assert!(world.does(checkpoints, &id).await.contains(&id));
        }
        ("Something is slow", [watch]) => {
            let Key { id, .. } = world.stored().await;
            assert!(world.does(watch, &id).await.contains(&id));
        }
        ("A token leaked", [edit, handoff]) => {
            let (mut socket, key) = world.running().await;
            world.does(edit, &key.id).await;
            world.does(handoff, &key.id).await;
            assert_eq!(socket.end().await, Some(1012));
            let mut thief = Socket::attach(&world.server, Dialect::Plain, &key).await;
            thief.status("PERMISSION_DENIAL_ERROR").await;
            let owner = Key { token: NEW_TOKEN.to_owned(), ..key };
            let mut socket = Socket::attach(&world.server, Dialect::Plain, &owner).await;
            socket.status("RUNNING").await;
            socket.kill().await;
        }
        ("Starting a sandbox without a client", [edit]) => {
            let Key { id, .. } = world.stored().await;
            world.does(edit, &id).await;
            eventually("an instance starts it", || {
                !world.is_free(&id) && world.metadata(&id)["status"]["phase"] == "running"
            })
            .await;
            world.does("baton delete ID", &id).await;
        }
        ("Cleaning up by hand", [dry, gc, dead]) => {
            for command in [dry, gc, dead] {
                world.does(command, "").await;
            }
        }
        (title, commands) => panic!("nothing here carries out {title}: {commands:?}"),
    }
}
