//! A JSON file that only its owner can read, and that one process at a time changes.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

#[derive(Clone, Debug)]
pub struct PrivateFile {
    path: PathBuf,
    /// What is in it, for messages.
    content: &'static str,
}

impl PrivateFile {
    pub fn new(path: impl Into<PathBuf>, content: &'static str) -> Self {
        Self { path: path.into(), content }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A missing file reads as the default.
    pub fn read<T: DeserializeOwned + Default>(&self) -> Result<T> {
        let named = || format!("the file of {} {}", self.content, self.path.display());
        match fs::read(&self.path) {
            Ok(bytes) => parse(&bytes).with_context(|| format!("{} is damaged", named())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
            Err(error) => Err(error).with_context(named),
        }
    }

    /// Writes what `change` leaves. A concurrent reader sees the old or the new file.
    pub fn edit<T: DeserializeOwned + Default + Serialize, R>(
        &self,
        change: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        let named = || format!("the file of {} {} cannot be written", self.content, self.path.display());
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).with_context(named)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.path.with_extension("lock"))
            .with_context(named)?;
        lock.set_permissions(fs::Permissions::from_mode(0o600)).with_context(named)?;
        lock.lock().with_context(named)?;
        let mut value = self.read()?;
        let changed = change(&mut value)?;
        let text = serde_json::to_vec_pretty(&value)?;
        let how = baton_files::How { mode: Some(0o600), ..baton_files::How::default() };
        baton_files::write(&self.path, &mut text.as_slice(), &how).with_context(named)?;
        Ok(changed)
    }
}

/// An object only: serde would also read a struct from an array.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let object: Map<String, Value> = serde_json::from_slice(bytes)?;
    serde_json::from_value(Value::Object(object))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    type Map = BTreeMap<String, u32>;

    fn add(file: &PrivateFile) -> Result<()> {
        file.edit(|map: &mut Map| {
            map.insert("a".into(), 1);
            Ok(())
        })
    }

    #[test]
    fn others_cannot_read_it_after_a_write_even_if_they_could_before() {
        let space = tempfile::tempdir().unwrap();
        let path = space.path().join("file.json");
        fs::write(&path, "{}").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        add(&PrivateFile::new(&path, "numbers")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_damaged_file_is_named_and_left_alone() {
        let space = tempfile::tempdir().unwrap();
        let path = space.path().join("file.json");
        fs::write(&path, "{").unwrap();
        let error = add(&PrivateFile::new(&path, "numbers")).unwrap_err();
        assert!(format!("{error:#}").contains("the file of numbers"), "{error:#}");
        assert!(format!("{error:#}").contains("damaged"), "{error:#}");
        assert_eq!(fs::read(&path).unwrap(), b"{");
    }

    #[test]
    fn a_change_that_fails_writes_nothing() {
        let space = tempfile::tempdir().unwrap();
        let file = PrivateFile::new(space.path().join("new/file.json"), "numbers");
        assert!(file.edit(|_: &mut Map| -> Result<()> { anyhow::bail!("no") }).is_err());
        assert!(!file.path().exists());
        add(&file).unwrap();
        assert_eq!(fs::metadata(space.path().join("new")).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(file.read::<Map>().unwrap()["a"], 1);
    }
}
