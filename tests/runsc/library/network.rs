//! A network that cuts, delays and stalls: nothing is lost and nothing comes twice.

use std::time::Duration;

use baton_client::{Exec, Language};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{Scene, cuts, impatient, testbed::size, text, tick, ticks};

/// Writes so many bytes that no two places look alike, then their digest to stderr.
fn flood(size: u64) -> String {
    format!(
        "import hashlib, sys
left, number, digest = {size}, 0, hashlib.sha256()
while left:
    part = b''.join(hashlib.sha256(b'%d' % (number + i)).digest() * 64 for i in range(32))[:left]
    number, left = number + 32, left - len(part)
    digest.update(part)
    sys.stdout.buffer.write(part)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
"
    )
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub async fn output_is_exact_over_many_cuts() {
    let mut scene = Scene::new().await;
    let (bytes, count) = (size("output"), size("cuts"));
    scene.testbed.network(&scene.proxy, json!({"cuts": cuts(bytes, count), "cut": true})).await;
    let ended = scene.sandbox.run_code(Language::Python, flood(bytes)).await.unwrap();
    assert_eq!((ended.stdout.len() as u64, ended.lost), (bytes, 0));
    assert_eq!(hex(&ended.stdout), text(&ended.stderr));
    let (_, cut) = scene.testbed.network(&scene.proxy, json!({})).await;
    assert!(cut + 2 >= count, "it was hardly cut: {cut}");
    scene.end().await;
}

pub async fn input_is_exact_over_many_cuts() {
    let mut scene = Scene::new().await;
    let (bytes, count) = (size("input"), size("input_cuts") as usize);
    let data: Vec<u8> = (0..bytes / 32).flat_map(|number| Sha256::digest(number.to_string().as_bytes())).collect();
    let running = scene.sandbox.exec(Exec::argv(["sha256sum"]).stdin()).await.unwrap();
    for part in data.chunks(data.len() / (count + 1) + 1) {
        running.write_stdin(part.to_vec()).await.unwrap();
        scene.testbed.network(&scene.proxy, json!({"cut": true})).await;
    }
    running.close_stdin();
    let ended = running.collect().await.unwrap();
    assert_eq!(text(&ended.stdout).split_whitespace().next(), Some(hex(&data).as_str()));
    scene.end().await;
}

pub async fn a_slow_network_changes_nothing() {
    let mut scene = Scene::new().await;
    scene.testbed.network(&scene.proxy, json!({"delay": 0.05})).await;
    assert_eq!(text(&scene.sandbox.run(tick(10)).await.unwrap().stdout), ticks(10));
    let running = scene.sandbox.exec(Exec::argv(["cat"]).stdin()).await.unwrap();
    running.write_stdin("slow").await.unwrap();
    running.close_stdin();
    assert_eq!(running.collect().await.unwrap().stdout, b"slow");
    scene.end().await;
}

pub async fn a_stalled_connection_is_given_up_and_taken_up_again() {
    let mut scene = Scene::with(impatient(Duration::from_secs(3))).await;
    let running = scene.sandbox.exec(tick(40)).await.unwrap();
    scene.testbed.network(&scene.proxy, json!({"stall": true})).await;
    let ended = running.collect().await.unwrap();
    assert_eq!((text(&ended.stdout), ended.outcome.exit_code), (ticks(40).as_str(), Some(7)));
    let (connections, _) = scene.testbed.network(&scene.proxy, json!({})).await;
    assert!(connections >= 2, "{connections}");
    scene.end().await;
}
