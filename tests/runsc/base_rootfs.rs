//! What people expect of a machine to work on is there and works in a real sandbox, without a network: in the root file
//! systems `base` and `data` of `scripts/rootfs/make`.

use serde_json::json;

use crate::{
    fixture::piece,
    servers::Machine,
    websocket_client::{Dialect, Socket},
};

/// A wheel of one module, as `pip wheel` would make it.
const WHEEL: &str = r#"
import os, zipfile
os.makedirs('/srv/wheels')
about = 'demo-1.0.dist-info'
with zipfile.ZipFile('/srv/wheels/demo-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('demo.py', 'answer = 42\n')
    wheel.writestr(f'{about}/METADATA', 'Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n')
    wheel.writestr(f'{about}/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    wheel.writestr(f'{about}/RECORD', f'demo.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n')
"#;

const EXTENSION: &str = r#"cat >/srv/six.c <<'END'
#include <Python.h>
static struct PyModuleDef about = {PyModuleDef_HEAD_INIT, "six", 0, -1, 0};
PyMODINIT_FUNC PyInit_six(void) {
    PyObject *module = PyModule_Create(&about);
    PyModule_AddIntConstant(module, "by_nine", 54);
    return module;
}
END
cd /srv && gcc -shared -fPIC $(python3-config --includes 2>/dev/null || python3 -c 'import sysconfig; print("-I" + sysconfig.get_path("include"))') six.c -o six.so
python3 -c 'import six; print(six.by_nine)'"#;

/// What is typed into bash as root, and what it prints on stdout.
const BASE: [(&str, &str); 16] = [
    (
        "for name in python python3 pip git curl wget ssh gcc g++ make patch node npm npx jq unzip zip xz bzip2 \
         less ps nano file; do command -v $name >/dev/null || echo $name; done",
        "",
    ),
    ("command -v sudo || id -u", "0\n"),
    ("pip install -q --no-index --find-links /srv/wheels demo && python3 -c 'import demo; print(demo.answer)'", "42\n"),
    // What an update of pip does; Debian's own cannot, since it has no record of its files.
    (
        "pip install -q --no-index --find-links /usr/share/python-wheels --force-reinstall pip && pip uninstall -q -y demo",
        "",
    ),
    (
        "python3 -m venv /srv/venv && /srv/venv/bin/pip install -q --no-index --find-links /srv/wheels demo \
         && /srv/venv/bin/python -c 'import demo, sys; print(demo.answer, sys.prefix)'",
        "42 /srv/venv\n",
    ),
    (
        "git init -q /srv/repo && cd /srv/repo && git config user.name n && git config user.email e@example.com \
         && echo kept >file && git add file && git commit -qm first && rm file && git checkout -q . && cat file",
        "kept\n",
    ),
    (
        "printf '#include <stdio.h>\\nint main(void) { puts(\"from C\"); }' >/srv/a.c && gcc -O2 /srv/a.c -o /srv/a && /srv/a",
        "from C\n",
    ),
    (
        "printf '#include <iostream>\\nint main() { std::cout << \"from C++\" << std::endl; }' >/srv/b.cc \
         && make -s -C /srv b CXX=g++ && /srv/b",
        "from C++\n",
    ),
    (EXTENSION, "54\n"),
    ("node -e 'console.log(6 * 7, new Intl.DateTimeFormat(\"de\").format(0))'", "42 1.1.1970\n"),
    (
        "mkdir -p /srv/package/lib && cd /srv/package && npm init -y >/dev/null && echo 'module.exports = 42' >index.js \
         && npm install -g --silent --offline --install-links . >/dev/null && ls /usr/local/lib/node_modules",
        "npm\npackage\n",
    ),
    ("python3 -c 'import ssl; print(len(ssl.create_default_context().get_ca_certs()) > 50)'", "True\n"),
    ("TZ=Asia/Tokyo date -d @0 +%H:%M; printf 'ä' | wc -m", "09:00\n1\n"),
    ("su user -c 'id -un; cd && pwd && touch here && echo $SHELL'", "user\n/home/user\n/bin/bash\n"),
    (
        "su - user -c 'python3 -m venv venv && venv/bin/pip install -q --no-index --find-links /srv/wheels demo \
         && venv/bin/python -c \"import demo; print(demo.answer)\"'",
        "42\n",
    ),
    ("su user -c 'touch /usr/local/lib/x' 2>/dev/null || echo refused", "refused\n"),
];

const DATA: &str = "
import io, numpy, pandas, scipy.stats, requests, IPython
from PIL import Image
from sklearn.linear_model import LinearRegression
import matplotlib.pyplot as plot
frame = pandas.DataFrame({'x': [1.0, 2.0, 3.0], 'y': [2.0, 4.0, 6.0]})
slope = LinearRegression().fit(frame[['x']], frame['y']).coef_[0]
print(round(float(slope), 6), round(scipy.stats.norm.cdf(0), 6), frame['y'].sum())
picture = io.BytesIO()
frame.plot(x='x', y='y')
plot.savefig(picture)
print(Image.open(picture).format, numpy.linalg.det(numpy.eye(3)))";

#[tokio::test(flavor = "multi_thread")]
async fn what_people_expect_works_without_a_network() {
    let recipe = std::fs::read_to_string(piece("BATON_TEST_ROOTFS").join("etc/baton-rootfs")).unwrap_or_default();
    if !["base", "data"].contains(&recipe.trim()) {
        println!("not tested: the root file system is neither base nor data");
        return;
    }
    let machine = Machine::with_a_directory().await;
    let server = machine.server("one").await;
    let (mut socket, _) = Socket::create(&server, Dialect::Plain, json!({"idle_timeout": null})).await;
    let (said, done) = socket.run("python", WHEEL).await;
    assert_eq!(done["exit_code"], json!(0), "{said}");
    // Before root installs the same for everybody.
    let user = "su user -c 'pip install -q --no-index --find-links /srv/wheels demo 2>&1; python3 -c \"import demo; \
                print(demo.__file__.startswith(\\\"/home/user/.local/\\\"))\"'";
    for (typed, expected) in [(user, "True\n")].iter().chain(&BASE) {
        let (said, done) = socket.run("bash", typed).await;
        assert_eq!((said.as_str(), &done["exit_code"]), (*expected, &json!(0)), "{typed}");
    }
    if recipe.trim() == "data" {
        let (said, done) = socket.run("python", DATA).await;
        assert_eq!((said.as_str(), &done["exit_code"]), ("2.0 0.5 12.0\nPNG 1.0\n", &json!(0)));
    }
    socket.kill().await;
    server.stop().await;
}
