//! The table as a page for people: `docs/configuration.md`. A test compares the page with it.

use std::fmt::Write;

use super::table::{Preset, SECTIONS};

/// The whole page.
pub fn document() -> String {
    let mut page = String::from(
        "# Configuration\n\n\
         Every setting is a variable of the environment and a flag of `baton serve`. A flag comes before a\n\
         variable, a variable before the default; an empty one counts as not set. `baton config` prints what\n\
         is in force and where it comes from. This page is made from the table in `src/config/table.rs` by\n\
         `make docs`.\n",
    );
    for section in SECTIONS {
        let _ = write!(
            page,
            "\n## {}\n\n| Variable | Flag | Meaning | Value | Default |\n|---|---|---|---|---|\n",
            section.title
        );
        for variable in section.variables {
            let flag = variable.flag().map_or_else(|| "none".to_owned(), |flag| format!("`--{flag}`"));
            let default = match variable.preset {
                Preset::Unset => "not set".to_owned(),
                Preset::Found(how) => how.to_owned(),
                Preset::Is(_) | Preset::Time(_) => format!("`{}`", variable.preset.value().unwrap_or_default()),
            };
            let _ = writeln!(
                page,
                "| `{}` | {flag} | {} | {} | {default} |",
                variable.name,
                variable.meaning,
                variable.kind.expects()
            );
        }
    }
    page
}
