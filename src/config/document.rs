//! The table as a page for people: `docs/configuration.md`. A test compares the page with it.

use std::fmt::Write;

use super::{Preset, SECTIONS};

/// The whole page.
pub fn document() -> String {
    let mut page = String::from(
        "# Configuration\n\n\
         Every setting is an environment variable and a flag of `baton serve`. A flag overrides a variable, and\n\
         a variable overrides the default; an empty value counts as unset. `baton config` prints the effective\n\
         values and their sources. `make docs` generates this page from the tables in\n\
         `src/config/variables/`.\n",
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
                Preset::Unset => "unset".to_owned(),
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
