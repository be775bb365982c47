//! `baton cp` of one large file, both ways, while the server under it is replaced or the sandbox moves away.

use std::{io::Write, path::Path, process::Output, time::Duration};

use tokio::process::Child;

use crate::{
    commandline::Person,
    fixture::clock,
    proxy::Proxy,
    servers::{Machine, Server, is_proof},
    transfer::{bytes, soon},
};

fn size() -> u64 {
    if is_proof() { 1 << 30 } else { 40 << 20 }
}

/// A person with a large file and a sandbox that outlives its server.
struct Scene {
    machine: Machine,
    proxy: Proxy,
    person: Person,
    id: String,
}

impl Scene {
    async fn new() -> (Self, Server) {
        let machine = Machine::with_a_directory().await;
        let server = machine.server("one").await;
        let proxy = Proxy::start(&server, 0, 0).await;
        let person = Person::at(&machine, proxy.url());
        let mut file = std::fs::File::create(person.home.join("large")).unwrap();
        let mut piece = bytes(1 << 20);
        for number in 0..size() >> 20 {
            piece[..8].copy_from_slice(&number.to_le_bytes());
            file.write_all(&piece).unwrap();
        }
        let id = person.gets(&["create", "--checkpoint", "--handoff"]).await.trim().to_owned();
        (Self { machine, proxy, person, id }, server)
    }

    /// A copy that has come some way and has some to go.
    async fn in_the_middle(&self, from: &str, to: &str) -> Child {
        let before = self.proxy.bytes();
        let mut child = self.person.types(&["cp", from, to]).spawn().unwrap();
        soon(self.proxy.after_bytes(before + size() / 4)).await;
        assert!(child.try_wait().unwrap().is_none(), "it is over already");
        child
    }

    async fn ends_well(&self, child: Child) {
        let ended = clock().timeout(Duration::from_secs(600), child.wait_with_output()).await;
        let Output { status, stdout, stderr } = ended.expect("it hangs").unwrap();
        // Nothing of what went on beneath it is the person's business.
        let said = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert_eq!((status.code(), said.0.as_ref(), said.1.as_ref()), (Some(0), "", ""));
    }

    fn there(&self) -> String {
        format!("{}:/srv/large", self.id)
    }

    async fn is_exact_there(&self) {
        let there = self.person.gets(&["exec", &self.id, "--", "sha256sum", "/srv/large"]).await;
        assert_eq!(there.split_whitespace().next(), Some(sum(&self.person.home.join("large")).as_str()));
    }

    fn is_exact_here(&self) {
        assert_eq!(sum(&self.person.home.join("back")), sum(&self.person.home.join("large")));
    }
}

fn sum(file: &Path) -> String {
    let output = std::process::Command::new("sha256sum").arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_goes_on_when_its_server_is_replaced() {
    let (scene, mut server) = Scene::new().await;
    for is_up in [true, false] {
        let there = scene.there();
        let (from, to) = if is_up { ("large", there.as_str()) } else { (there.as_str(), "back") };
        let mut child = scene.in_the_middle(from, to).await;
        // SIGTERM; it ends in order, and for a while there is no server at all.
        server.stop().await;
        assert!(child.try_wait().unwrap().is_none(), "it is over already");
        server = scene.machine.server("one").await;
        scene.proxy.lead_to(&server);
        scene.ends_well(child).await;
        if is_up {
            scene.is_exact_there().await
        } else {
            scene.is_exact_here()
        }
        assert!(server.log().contains(&scene.id), "it is on the new server");
    }
    scene.person.gets(&["kill", &scene.id]).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_goes_on_when_the_sandbox_moves() {
    let (scene, one) = Scene::new().await;
    let two = scene.machine.server("two").await;
    let there = scene.there();
    let epoch = || scene.machine.lock(&scene.id)["epoch"].as_u64().unwrap();
    for (from, to, next) in [("large", there.as_str(), &two), (there.as_str(), "back", &one)] {
        let before = epoch();
        let child = scene.in_the_middle(from, to).await;
        // Whoever is cut off comes back to the other server, which asks for the sandbox.
        scene.proxy.lead_to(next);
        scene.ends_well(child).await;
        assert!(epoch() > before && next.log().contains(&scene.id), "it did not move");
        if to == "back" { scene.is_exact_here() } else { scene.is_exact_there().await }
    }
    scene.person.gets(&["kill", &scene.id]).await;
    one.stop().await;
    two.stop().await;
}
