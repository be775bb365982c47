//! Listings: prefixes, delimiters, pages.

use std::ops::Bound;

use axum::extract::{Path, Query as Parsed, State};
use serde_json::{Value, json};

use crate::{
    SharedServer, drop_connection,
    injected_fault::Op,
    json::{Parameters, Reply, describe, json_reply, refuse},
    objects::{FakeObject, ObjectRefusal, Objects},
};

pub const LONGEST_PAGE: usize = 1000;

/// What a listing asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query<'a> {
    pub prefix: &'a str,
    /// Names that have it after the prefix are told by what comes before it, once. Empty: none are.
    pub delimiter: &'a str,
    /// An object whose name ends with the delimiter is listed too.
    pub with_trailing: bool,
    /// The first name that may be told, and the first that may not; empty is no bound.
    pub start: &'a str,
    pub end: &'a str,
    /// The name or prefix that the page before ended with.
    pub after: Option<&'a str>,
    pub limit: usize,
}

#[derive(Debug, Default)]
pub struct ListingPage<'a> {
    pub objects: Vec<(&'a str, &'a FakeObject)>,
    pub prefixes: Vec<&'a str>,
    /// What the next page comes after, if there is one.
    pub next: Option<&'a str>,
}

impl Objects {
    pub fn list(&self, bucket: &str, query: Query<'_>) -> Result<ListingPage<'_>, ObjectRefusal> {
        self.check_bucket(bucket)?;
        let first = query.start.max(query.prefix).max(query.after.unwrap_or_default());
        let from = (bucket.to_owned(), first.to_owned());
        let names = self
            .objects
            .range((Bound::Included(from), Bound::Unbounded))
            .map(|((home, name), object)| (home, name.as_str(), object))
            .take_while(|(home, name, _)| *home == bucket && name.starts_with(query.prefix))
            .take_while(|(_, name, _)| query.end.is_empty() || *name < query.end);
        let (mut page, mut last) = (ListingPage::default(), None);
        for (_, name, object) in names {
            let folded = fold(name, &query);
            let told = folded.unwrap_or(name);
            if Some(told) == query.after || (folded.is_some() && page.prefixes.last() == folded.as_ref()) {
                continue;
            }
            if page.objects.len() + page.prefixes.len() >= query.limit {
                page.next = last;
                break;
            }
            page.prefixes.extend(folded);
            if folded.is_none() || (query.with_trailing && folded == Some(name)) {
                page.objects.push((name, object));
            }
            last = Some(told);
        }
        Ok(page)
    }
}

/// What stands for a name that has the delimiter after the prefix.
fn fold<'a>(name: &'a str, query: &Query<'_>) -> Option<&'a str> {
    if query.delimiter.is_empty() {
        return None;
    }
    let at = name[query.prefix.len()..].find(query.delimiter)?;
    Some(&name[..query.prefix.len() + at + query.delimiter.len()])
}

pub async fn list(
    State(state): State<SharedServer>,
    Path(bucket): Path<String>,
    Parsed(parameters): Parsed<Parameters>,
) -> Reply {
    let text = |name: &str| parameters.get(name).map_or("", String::as_str);
    let plan = match state.receive(Op::List, text("prefix")).await {
        Ok(plan) => plan,
        Err(refusal) => return refuse(&refusal),
    };
    let limit = text("maxResults").parse().ok().filter(|limit| *limit > 0).unwrap_or(LONGEST_PAGE);
    let query = Query {
        prefix: text("prefix"),
        delimiter: text("delimiter"),
        with_trailing: text("includeTrailingDelimiter").eq_ignore_ascii_case("true"),
        start: text("startOffset"),
        end: text("endOffset"),
        after: parameters.get("pageToken").map(String::as_str),
        limit: limit.min(LONGEST_PAGE),
    };
    let objects = state.objects();
    let answer = match objects.list(&bucket, query) {
        Ok(page) => json_reply(200, &shown(&state.url, &bucket, &page)),
        Err(refusal) => refuse(&refusal),
    };
    if plan.lose_reply {
        drop_connection();
    }
    answer
}

/// Empty fields are left out, as the service does.
fn shown(url: &str, bucket: &str, page: &ListingPage<'_>) -> Value {
    let mut answer = json!({"kind": "storage#objects"});
    if !page.objects.is_empty() {
        answer["items"] =
            page.objects.iter().map(|(name, object)| describe(url, bucket, name, object, object.md5())).collect();
    }
    if !page.prefixes.is_empty() {
        answer["prefixes"] = json!(page.prefixes);
    }
    if let Some(next) = page.next {
        answer["nextPageToken"] = json!(next);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Condition, DeclaredAttributes};

    fn objects() -> Objects {
        let mut objects = Objects::new(vec!["b".to_owned()], None);
        for name in ["a/", "a/1", "a/2", "a/c/3", "b", "c/4"] {
            objects.put("b", name, "x".into(), &DeclaredAttributes::default(), Condition::default()).unwrap();
        }
        objects
    }

    /// All pages of a listing, one after the other, as names and prefixes.
    fn all(query: Query<'_>) -> (Vec<String>, Vec<String>) {
        let objects = objects();
        let (mut names, mut prefixes) = (Vec::new(), Vec::new());
        let mut after: Option<String> = None;
        loop {
            let page = objects.list("b", Query { after: after.as_deref(), ..query }).unwrap();
            assert!(page.objects.len() <= query.limit && page.prefixes.len() <= query.limit);
            names.extend(page.objects.iter().map(|(name, _)| (*name).to_owned()));
            prefixes.extend(page.prefixes.iter().map(|prefix| (*prefix).to_owned()));
            match page.next {
                Some(next) => after = Some(next.to_owned()),
                None => return (names, prefixes),
            }
        }
    }

    #[test]
    fn pages_of_every_length_follow_each_other_without_gap_or_overlap() {
        for limit in 1..8 {
            let flat = all(Query { limit, ..Query::default() });
            assert_eq!(flat.0, ["a/", "a/1", "a/2", "a/c/3", "b", "c/4"]);
            let top = all(Query { delimiter: "/", limit, ..Query::default() });
            assert_eq!(top, (vec!["b".to_owned()], vec!["a/".to_owned(), "c/".to_owned()]));
            let inside = all(Query { prefix: "a/", delimiter: "/", limit, ..Query::default() });
            assert_eq!(inside, (["a/", "a/1", "a/2"].map(str::to_owned).into(), vec!["a/c/".to_owned()]));
        }
    }

    #[test]
    fn an_object_that_ends_with_the_delimiter_is_told_on_demand() {
        let query = Query { delimiter: "/", with_trailing: true, limit: 9, ..Query::default() };
        assert_eq!(all(query).0, ["a/", "b"]);
    }

    #[test]
    fn offsets_bound_a_listing() {
        assert_eq!(all(Query { start: "a/2", end: "c", limit: 9, ..Query::default() }).0, ["a/2", "a/c/3", "b"]);
    }
}
