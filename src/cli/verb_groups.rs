//! The help of `baton` itself: its verbs in groups, which clap cannot do.

use clap::{Command, builder::Styles};

/// The verbs in the order of the help.
pub const GROUPS: [(&str, &[&str]); 4] = [
    (
        "Sandboxes",
        &[
            "run",
            "create",
            "exec",
            "shell",
            "cp",
            "logs",
            "port-forward",
            "list",
            "get",
            "checkpoint",
            "handoff",
            "fork",
            "kill",
            "snapshot",
        ],
    ),
    (
        "Stored sandboxes, without a server",
        &["watch", "checkpoints", "rollback", "edit", "delete", "repair", "gc", "explain"],
    ),
    ("Servers", &["serve", "api", "reconciler", "config"]),
    ("Other", &["context", "completions", "dev", "help"]),
];

/// A help template with the verbs of `root` in groups.
pub fn template(root: &Command) -> String {
    let header = *Styles::default().get_header();
    let literal = *Styles::default().get_literal();
    let heading = |title: &str| format!("{header}{title}:{header:#}\n");
    let about = |name: &str| match root.find_subcommand(name) {
        Some(verb) => verb.get_about().map(ToString::to_string).unwrap_or_default(),
        // Clap adds it later.
        None => "Print the help of a verb".to_owned(),
    };
    let width = GROUPS.iter().flat_map(|(_, names)| *names).map(|name| name.len()).max().unwrap_or(0);
    let groups = GROUPS.iter().map(|(title, names)| {
        let lines = names.iter().map(|name| format!("  {literal}{name:width$}{literal:#}  {}\n", about(name)));
        format!("{}{}\n", heading(title), lines.collect::<String>())
    });
    let groups: String = groups.collect();
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}{}{{options}}{{after-help}}",
        heading("Global options")
    )
}
