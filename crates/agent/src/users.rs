//! The user that a command runs as. The files are read here, because a static executable cannot use the C
//! library for it.

use std::fs;

/// A user of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
    pub name: Option<String>,
}

/// The user with that name or number; a number needs no entry.
pub fn find(wanted: &str) -> Option<User> {
    let read = |path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    find_in(wanted, &read("/etc/passwd"), &read("/etc/group"))
}

fn find_in(wanted: &str, passwd: &str, group: &str) -> Option<User> {
    let number: Option<u32> = wanted.parse().ok().filter(|number| *number != u32::MAX);
    let entry = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, ..] = fields[..] else { return None };
        let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
        (name == wanted || number == Some(uid)).then(|| (name.to_owned(), uid, gid, home.to_owned()))
    });
    let Some((name, uid, gid, home)) = entry else {
        let uid = number?;
        return Some(User { uid, gid: uid, groups: vec![uid], home: "/".to_owned(), name: None });
    };
    let mut groups = vec![gid];
    groups.extend(group.lines().filter_map(|line| {
        let mut fields = line.split(':').skip(2);
        let (gid, members) = (fields.next()?.parse::<u32>().ok()?, fields.next()?);
        members.split(',').any(|member| member == name).then_some(gid)
    }));
    Some(User { uid, gid, groups, home, name: Some(name) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\nada:x:1000:100::/home/ada:/bin/bash\n";
    const GROUP: &str = "root:x:0:\nusers:x:100:\nwheel:x:10:bob,ada\nother:x:11:adam\n";

    #[test]
    fn a_user_is_found_by_name_and_by_number_with_all_groups() {
        let ada = User {
            uid: 1000,
            gid: 100,
            groups: vec![100, 10],
            home: "/home/ada".to_owned(),
            name: Some("ada".to_owned()),
        };
        assert_eq!(find_in("ada", PASSWD, GROUP), Some(ada.clone()));
        assert_eq!(find_in("1000", PASSWD, GROUP), Some(ada));
    }

    #[test]
    fn a_number_needs_no_entry_but_a_name_does() {
        assert_eq!(find_in("4711", PASSWD, GROUP).map(|user| (user.uid, user.gid)), Some((4711, 4711)));
        for unknown in ["eve", "", "-1", "broken", "4294967295"] {
            assert_eq!(find_in(unknown, PASSWD, GROUP), None, "{unknown:?}");
        }
    }
}
