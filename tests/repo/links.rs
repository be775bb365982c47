//! Links between the pages lead to files and headings that exist, and both indexes name every page.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Component, Path, PathBuf},
};

use crate::repo_files::{read, root};

/// Every page, by its path from the root.
fn pages() -> BTreeSet<String> {
    let mut found: BTreeSet<String> =
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "manifests/README.md"].map(str::to_owned).into();
    let mut below = |folder: &str, is_page: &dyn Fn(&Path) -> bool| {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && is_page(&path) {
                found.insert(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
            }
        }
    };
    let is_markdown = |path: &Path| path.extension().is_some_and(|kind| kind == "md");
    below("docs", &is_markdown);
    below("docs/adr", &is_markdown);
    for client in ["clients/python", "clients/typescript"] {
        below(client, &|path| path.file_name().is_some_and(|name| name == "README.md"));
    }
    found
}

/// The lines of a page that are not part of a code block.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// A line without its inline code.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// The targets of all links and images of a page.
fn links(text: &str) -> Vec<String> {
    let mut found = vec![];
    for line in prose(text) {
        let line = without_code(line);
        found.extend(line.split("](").skip(1).map(|rest| rest.split([')', ' ']).next().unwrap().to_owned()));
    }
    found
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut times: HashMap<String, u32> = HashMap::new();
    for line in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        // Of a link only its text is part of the title.
        let mut shown = String::new();
        let mut rest = title.trim();
        while let Some((before, after)) = rest.split_once("](") {
            shown += before;
            rest = after.split_once(')').map_or("", |(_, rest)| rest);
        }
        shown += rest;
        let is_kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let anchor: String = shown.to_lowercase().chars().filter(is_kept).collect::<String>().replace(' ', "-");
        let count = times.entry(anchor.clone()).or_default();
        found.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    found
}

/// A path from the root, with `..` resolved; `None` if it leads out of the repository.
fn resolve(page: &str, link: &str) -> Option<PathBuf> {
    let mut path = Path::new(page).parent().unwrap().to_path_buf();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir if path.pop() => {}
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

/// What is wrong with a link of a page.
fn fault(page: &str, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target = if file.is_empty() { Some(PathBuf::from(page)) } else { resolve(page, file) };
    let Some(target) = target.filter(|target| root().join(target).exists()) else {
        return Some(format!("{page} links to {file}, which does not exist"));
    };
    let anchor = anchor?;
    let is_page = target.extension().is_some_and(|kind| kind == "md");
    let is_there = is_page && anchors(&read(target.to_str().unwrap())).contains(anchor);
    (!is_there).then(|| format!("{page} links to {link}, and no heading there has this anchor"))
}

#[test]
fn every_link_leads_to_a_file_and_to_a_heading() {
    let mut count = 0;
    let mut faults = vec![];
    for page in pages() {
        for link in links(&read(&page)) {
            faults.extend(fault(&page, &link));
            count += 1;
        }
    }
    assert_eq!(faults, [""; 0]);
    assert!(count > 150, "only {count} links were found");
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    assert_eq!(fault("docs/deploy.md", "../README.md#quick-start"), None);
    assert_eq!(fault("docs/deploy.md", "https://example.com/#x"), None);
    assert!(fault("docs/deploy.md", "nowhere.md").unwrap().contains("does not exist"));
    assert!(fault("README.md", "../outside.md").unwrap().contains("does not exist"));
    assert!(fault("docs/deploy.md", "operate.md#nothing").unwrap().contains("no heading"));
    let text =
        "# A `title`, twice\n## A title twice\n```\n# no title\n[no](link)\n```\n[a](b.md#c) `[no](x)` ![d](e.svg)\n";
    assert_eq!(anchors(text), ["a-title-twice".to_owned(), "a-title-twice-1".to_owned()].into());
    assert_eq!(links(text), ["b.md#c", "e.svg"]);
}

/// The navigation of the site has every page once; the index has all but the decisions, which it names as a whole.
#[test]
fn both_indexes_name_every_page() {
    let named = |index: &str| -> Vec<String> {
        let links = links(&read(index));
        let files = links.iter().filter(|link| !link.contains("://"));
        files.map(|link| resolve(index, link).unwrap().to_str().unwrap().to_owned()).collect()
    };
    let summary = named("docs/SUMMARY.md");
    let all: BTreeSet<_> = pages().into_iter().filter(|page| page != "docs/SUMMARY.md").collect();
    assert_eq!(summary.iter().cloned().collect::<BTreeSet<_>>(), all, "docs/SUMMARY.md");
    assert_eq!(summary.len(), all.len(), "docs/SUMMARY.md names a page twice");
    let index: BTreeSet<_> = named("docs/README.md").into_iter().collect();
    for page in all.iter().filter(|page| !page.starts_with("docs/adr/")) {
        let is_named = index.contains(page) || page == "README.md" || page == "docs/README.md";
        assert!(is_named, "docs/README.md does not name {page}");
    }
}
