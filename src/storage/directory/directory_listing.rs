//! Lists a directory store in key order, page by page.

use std::{fs, io, path::Path};

use super::directory_tree::ObjectRead;
use crate::storage::{
    local_files::local_error,
    store::{ObjectEntry, Page, Result},
};

/// One page of the objects under `root`; `look` returns version and size of a key.
pub fn page(
    root: &Path,
    prefix: &str,
    after: Option<&str>,
    size: usize,
    look: &dyn Fn(&str) -> Result<Option<ObjectRead>>,
) -> Result<Page> {
    let mut walk = Walk { root, look, prefix, after, size, page: Page::default() };
    walk.folder("")?;
    Ok(walk.page)
}

struct Walk<'a> {
    root: &'a Path,
    look: &'a dyn Fn(&str) -> Result<Option<ObjectRead>>,
    prefix: &'a str,
    after: Option<&'a str>,
    size: usize,
    page: Page,
}

impl Walk<'_> {
    /// Visits everything under `folder` (empty, or ending with a slash); stops once the page is full.
    fn folder(&mut self, folder: &str) -> Result<()> {
        for name in self.names(folder)? {
            if self.page.more {
                return Ok(());
            }
            let key = format!("{folder}{name}");
            if key.ends_with('/') {
                self.folder(&key)?;
                if key.starts_with(self.prefix) {
                    self.page.folders.push(key);
                }
            } else if let Some(seen) = (self.look)(&key)? {
                if self.page.entries.len() == self.size {
                    self.page.more = true;
                    return Ok(());
                }
                self.page.entries.push(ObjectEntry {
                    key,
                    version: seen.version,
                    size: seen.size,
                    updated: seen.updated,
                });
            }
        }
        Ok(())
    }

    /// The names to visit, directories with a trailing slash: sorted this way, the walk follows the order of keys.
    fn names(&self, folder: &str) -> Result<Vec<String>> {
        let failed = |error: io::Error| local_error(folder, &error);
        let entries = match fs::read_dir(self.root.join(folder)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            let Ok(mut name) = entry.file_name().into_string() else { continue };
            // Skip our own directory and editors' temporary files.
            if name.starts_with('.') {
                continue;
            }
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                name.push('/');
            } else if !kind.is_file() {
                continue;
            }
            if self.wanted(&format!("{folder}{name}")) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn wanted(&self, key: &str) -> bool {
        let is_folder = key.ends_with('/');
        let under = key.starts_with(self.prefix) || (is_folder && self.prefix.starts_with(key));
        under && self.after.is_none_or(|after| key > after || (is_folder && after.starts_with(key)))
    }
}
