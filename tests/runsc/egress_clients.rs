//! The programs that people use, as they are, against servers with certificates of a test's own authority, before and
//! after a move.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    network_fixture::{Network, NetworkedMachine, OTHER_PUBLIC, comes_true},
    sandbox_programs::Programs,
};

const HOST: &str = "files.example.org";

/// Makes an authority, a certificate of it, and a directory with a package index, a repository and a registry.
const PREPARE: &str = r#"
set -eu
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj '/CN=authority' \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign -keyout ca.key -out ca.pem 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$HOST" -keyout key.pem -out request.pem 2>/dev/null
printf 'subjectAltName=DNS:%s\nextendedKeyUsage=serverAuth\nbasicConstraints=CA:FALSE\n' "$HOST" >extensions
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out cert.pem 2>/dev/null
mkdir -p www/simple/greeting www/npm
echo 'hello over tls' >www/hello.txt
python3 - <<'PYTHON'
import zipfile
info = 'greeting-1.0.dist-info/'
with zipfile.ZipFile('www/simple/greeting/greeting-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('greeting.py', 'print("hello from a wheel")\n')
    wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n')
    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    wheel.writestr(info + 'RECORD', 'greeting.py,,\n' + ''.join(info + name + ',,\n' for name in ['METADATA', 'WHEEL', 'RECORD']))
open('www/simple/greeting/index.html', 'w').write('<a href="greeting-1.0-py3-none-any.whl">greeting-1.0-py3-none-any.whl</a>')
PYTHON
git init --quiet source
echo 'hello from a repository' >source/hello
git -C source add hello
git -C source -c user.name=test -c user.email=test@example.org commit --quiet -m hello
git clone --quiet --bare source www/greeting.git
git -C www/greeting.git update-server-info
mkdir package
echo '{"name": "greeting", "version": "1.0.0", "main": "index.js"}' >package/package.json
echo 'console.log("hello from a package")' >package/index.js
tar czf www/npm/greeting-1.0.0.tgz package
cat >www/npm/greeting <<JSON
{"name": "greeting", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {"name": "greeting", "version": "1.0.0",
 "main": "index.js", "dist": {"tarball": "https://$HOST/npm/greeting-1.0.0.tgz",
 "shasum": "$(sha1sum www/npm/greeting-1.0.0.tgz | cut -d' ' -f1)"}}}}
JSON
"#;

const SERVE: &str = r#"
import functools, http.server, ssl
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory='www')
server = http.server.ThreadingHTTPServer(('0.0.0.0', 443), handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('cert.pem', 'key.pem')
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
open('serving', 'w').close()
server.serve_forever()
"#;

/// What each program is called, what is run, and what it prints at last.
const PROGRAMS: [(&str, &str, &str); 5] = [
    (
        "python3",
        "python3 -c 'import ssl, urllib.request as r; c = ssl.create_default_context(cafile=\"/tmp/ca.pem\"); print(r.urlopen(\"https://files.example.org/hello.txt\", context=c, timeout=30).read().decode(), end=\"\")'",
        "hello over tls\n",
    ),
    ("curl", "curl --silent --show-error --fail --max-time 30 https://files.example.org/hello.txt", "hello over tls\n"),
    (
        "pip",
        "pip install --quiet --disable-pip-version-check --no-cache-dir --root-user-action ignore --target $PWD/here --index-url https://files.example.org/simple greeting && PYTHONPATH=$PWD/here python3 -c 'import greeting'",
        "hello from a wheel\n",
    ),
    (
        "git",
        "git clone --quiet https://files.example.org/greeting.git && cat greeting/hello",
        "hello from a repository\n",
    ),
    (
        "npm",
        "npm install --silent --no-audit --no-fund --registry https://files.example.org/npm greeting && node -e 'require(\"greeting\")'",
        "hello from a package\n",
    ),
];

const ENVIRONMENT: [(&str, &str); 6] = [
    ("PIP_CERT", "/tmp/ca.pem"),
    ("GIT_SSL_CAINFO", "/tmp/ca.pem"),
    ("CURL_CA_BUNDLE", "/tmp/ca.pem"),
    ("NODE_EXTRA_CA_CERTS", "/tmp/ca.pem"),
    ("HOME", "/root"),
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
];

/// A server for files over TLS. Ends with this value.
struct FileServer(std::process::Child);

impl FileServer {
    async fn start(network: &Network, directory: &Path) -> Self {
        std::fs::create_dir(directory).unwrap();
        let prepared = Command::new("bash").args(["-c", PREPARE]).env("HOST", HOST).current_dir(directory).output();
        let prepared = prepared.unwrap();
        assert!(prepared.status.success(), "{}", String::from_utf8_lossy(&prepared.stderr));
        let child = network.within(|| {
            let mut server = Command::new("python3");
            server.args(["-c", SERVE]).current_dir(directory).stdin(Stdio::null());
            server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        });
        let server = Self(child);
        let marker = directory.join("serving");
        comes_true("files are served", || marker.exists()).await;
        server
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn all_programs_work(sandbox: &mut Programs, turn: usize) {
    for (program, command, expected) in PROGRAMS {
        let found = sandbox.run(&["sh", "-c", &format!("command -v {program}")], &ENVIRONMENT).await;
        if found.2 != Some(0) {
            println!("{program} is not in the root file system: it was not tried");
            continue;
        }
        let script = format!("mkdir -p /tmp/{program}-{turn} && cd /tmp/{program}-{turn} && {command}");
        let (stdout, stderr, code) = sandbox.run(&["bash", "-c", &script], &ENVIRONMENT).await;
        assert_eq!((code, stdout.as_str()), (Some(0), expected), "{program}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_that_people_use_work_as_they_are_before_and_after_a_move() {
    let machine = NetworkedMachine::new().await;
    machine.names.add(HOST, &[OTHER_PUBLIC]);
    let directory = machine.machine.directory.path().join("files");
    let _files = FileServer::start(&machine.outside, &directory).await;
    let list = [("BATON_EGRESS", "files.example.org:443")];
    let (one, two) = tokio::join!(machine.server("a", &list), machine.server("b", &list));
    let mut sandbox = Programs::start_as(&one, crate::live_handoff::movable()).await;
    let authority = std::fs::read_to_string(directory.join("ca.pem")).unwrap();
    sandbox.python(&format!("open('/tmp/ca.pem', 'w').write({authority:?})")).await;
    all_programs_work(&mut sandbox, 0).await;
    sandbox.move_to(&two).await;
    all_programs_work(&mut sandbox, 1).await;
    sandbox.kill().await;
    one.stop().await;
    two.stop().await;
}
