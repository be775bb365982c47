//! The buckets and the objects in them: generations, conditions, pages. No transport.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use serde_json::Value;

#[derive(Clone, Debug)]
pub struct Object {
    pub generation: i64,
    pub data: Bytes,
    pub crc32c: u32,
    pub content_type: String,
    pub metadata: HashMap<String, String>,
    pub updated: SystemTime,
}

/// What a writer says about an object besides its content.
#[derive(Clone, Debug, Default)]
pub struct About {
    pub content_type: Option<String>,
    pub metadata: HashMap<String, String>,
    /// Checked against the content.
    pub crc32c: Option<u32>,
}

/// Why a request is not done, in the service's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    NoBucket,
    NoObject(String),
    Precondition,
    NotModified,
    Invalid(&'static str),
    TooMany,
    Unavailable,
    Unimplemented,
    /// Because a fault says so.
    Status(u16),
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Condition {
    pub is: Option<i64>,
    pub is_not: Option<i64>,
}

impl Condition {
    /// Generation 0 stands for an object that does not exist.
    pub fn check(self, current: Option<&Object>) -> Result<(), Refusal> {
        let generation = current.map_or(0, |object| object.generation);
        if self.is.is_some_and(|wanted| wanted != generation) {
            return Err(Refusal::Precondition);
        }
        if self.is_not.is_some_and(|known| known == generation) {
            return Err(Refusal::NotModified);
        }
        Ok(())
    }
}

/// An upload that comes in pieces.
#[derive(Debug)]
pub struct Upload {
    pub bucket: String,
    pub name: String,
    pub about: About,
    pub condition: Condition,
    pub data: Vec<u8>,
    /// The answer, once all bytes were there: it may be asked for again.
    pub done: Option<Value>,
}

type Place = (String, String);
type Listed<'a> = Vec<(&'a str, &'a Object)>;

#[derive(Debug)]
pub struct Objects {
    buckets: BTreeSet<String>,
    objects: BTreeMap<Place, Object>,
    pub uploads: HashMap<String, Upload>,
    written: HashMap<Place, Instant>,
    write_interval: Option<Duration>,
    last: i64,
}

/// What a listing asks for.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    pub prefix: &'a str,
    /// The first name of the page; with `after`, the last of the page before.
    pub start: &'a str,
    pub after: bool,
    pub limit: usize,
}

impl Objects {
    pub fn new(buckets: Vec<String>, write_interval: Option<Duration>) -> Self {
        // Generations of the real service look like microseconds; they are unique over restarts that way, too.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            buckets: buckets.into_iter().collect(),
            objects: BTreeMap::new(),
            uploads: HashMap::new(),
            written: HashMap::new(),
            write_interval,
            last: i64::try_from(now.as_micros()).unwrap_or(1),
        }
    }

    pub fn set_write_interval(&mut self, interval: Option<Duration>) {
        self.write_interval = interval;
    }

    pub fn begin(&mut self, upload: Upload) -> String {
        self.last += 1;
        let id = format!("upload-{}", self.last);
        self.uploads.insert(id.clone(), upload);
        id
    }

    pub fn check_bucket(&self, bucket: &str) -> Result<(), Refusal> {
        if self.buckets.is_empty() || self.buckets.contains(bucket) { Ok(()) } else { Err(Refusal::NoBucket) }
    }

    pub fn get(&self, bucket: &str, name: &str) -> Result<&Object, Refusal> {
        self.check_bucket(bucket)?;
        self.find(bucket, name).ok_or_else(|| Refusal::NoObject(format!("{bucket}/{name}")))
    }

    pub fn find(&self, bucket: &str, name: &str) -> Option<&Object> {
        self.objects.get(&(bucket.to_owned(), name.to_owned()))
    }

    pub fn put(
        &mut self,
        bucket: &str,
        name: &str,
        data: Bytes,
        about: &About,
        condition: Condition,
    ) -> Result<Object, Refusal> {
        self.check_bucket(bucket)?;
        condition.check(self.find(bucket, name))?;
        let place = (bucket.to_owned(), name.to_owned());
        let too_soon = |interval| self.written.get(&place).is_some_and(|written| written.elapsed() < interval);
        if self.write_interval.is_some_and(too_soon) {
            return Err(Refusal::TooMany);
        }
        let crc32c = crc32c::crc32c(&data);
        if about.crc32c.is_some_and(|said| said != crc32c) {
            return Err(Refusal::Invalid("Provided CRC32C doesn't match calculated CRC32C."));
        }
        self.last += 1;
        let object = Object {
            generation: self.last,
            data,
            crc32c,
            content_type: about.content_type.clone().unwrap_or_else(|| "application/octet-stream".to_owned()),
            metadata: about.metadata.clone(),
            updated: SystemTime::now(),
        };
        self.written.insert(place.clone(), Instant::now());
        self.objects.insert(place, object.clone());
        Ok(object)
    }

    pub fn force(&mut self, bucket: &str, name: &str, data: Bytes) {
        let interval = self.write_interval.take();
        let stored = self.put(bucket, name, data, &About::default(), Condition::default());
        self.write_interval = interval;
        debug_assert!(stored.is_ok(), "no bucket {bucket}");
    }

    pub fn delete(&mut self, bucket: &str, name: &str, condition: Condition) -> Result<(), Refusal> {
        condition.check(Some(self.get(bucket, name)?))?;
        self.objects.remove(&(bucket.to_owned(), name.to_owned()));
        Ok(())
    }

    /// A page, and whether there is more.
    pub fn list(&self, bucket: &str, query: Query<'_>) -> Result<(Listed<'_>, bool), Refusal> {
        self.check_bucket(bucket)?;
        let start = (bucket.to_owned(), query.start.max(query.prefix).to_owned());
        let from = if query.after { Bound::Excluded(start) } else { Bound::Included(start) };
        let mut found = self
            .objects
            .range((from, Bound::Unbounded))
            .take_while(|((home, name), _)| home == bucket && name.starts_with(query.prefix))
            .map(|((_, name), object)| (name.as_str(), object));
        let page = found.by_ref().take(query.limit).collect();
        Ok((page, found.next().is_some()))
    }

    /// Up to 32 objects one after the other, as a new one.
    pub fn compose(
        &mut self,
        bucket: &str,
        name: &str,
        sources: &[(String, Option<i64>)],
        about: &About,
        condition: Condition,
    ) -> Result<Object, Refusal> {
        if sources.is_empty() || sources.len() > 32 {
            return Err(Refusal::Invalid("The number of source components must be between 1 and 32."));
        }
        let mut data = Vec::new();
        for (source, generation) in sources {
            let object = self.get(bucket, source)?;
            Condition { is: *generation, is_not: None }.check(Some(object))?;
            data.extend_from_slice(&object.data);
        }
        self.put(bucket, name, data.into(), about, condition)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects() -> Objects {
        Objects::new(vec!["b".to_owned()], None)
    }

    fn put(objects: &mut Objects, name: &str, is: Option<i64>) -> Result<i64, Refusal> {
        let condition = Condition { is, is_not: None };
        objects.put("b", name, name.as_bytes().to_vec().into(), &About::default(), condition).map(|o| o.generation)
    }

    #[test]
    fn generations_decide_who_may_write() {
        let mut objects = objects();
        let first = put(&mut objects, "a", Some(0)).unwrap();
        assert_eq!(put(&mut objects, "a", Some(0)), Err(Refusal::Precondition));
        let second = put(&mut objects, "a", Some(first)).unwrap();
        assert_ne!(first, second);
        let stale = Condition { is: Some(first), is_not: None };
        assert_eq!(objects.delete("b", "a", stale), Err(Refusal::Precondition));
        objects.delete("b", "a", Condition::default()).unwrap();
        assert!(matches!(objects.delete("b", "a", Condition::default()), Err(Refusal::NoObject(_))));
        assert_eq!(objects.get("c", "a").unwrap_err(), Refusal::NoBucket);
    }

    #[test]
    fn a_second_write_within_the_interval_is_too_many_and_changes_nothing() {
        let mut objects = Objects::new(Vec::new(), Some(Duration::from_secs(3600)));
        let first = put(&mut objects, "a", None).unwrap();
        assert_eq!(put(&mut objects, "a", None), Err(Refusal::TooMany));
        assert_eq!(put(&mut objects, "a", Some(1)), Err(Refusal::Precondition), "the condition comes first");
        assert_eq!(objects.get("b", "a").unwrap().generation, first);
        put(&mut objects, "other", None).unwrap();
    }

    #[test]
    fn content_that_is_not_what_its_writer_says_is_refused() {
        let about = About { crc32c: Some(1), ..About::default() };
        let answer = objects().put("b", "a", Bytes::from_static(b"x"), &about, Condition::default());
        assert!(matches!(answer, Err(Refusal::Invalid(_))));
    }

    #[test]
    fn pages_follow_each_other_without_gap_or_overlap() {
        let mut objects = objects();
        for name in ["p/1", "p/2", "p/3", "q"] {
            put(&mut objects, name, None).unwrap();
        }
        let names = |start, after, limit| {
            let (page, more) = objects.list("b", Query { prefix: "p/", start, after, limit }).unwrap();
            (page.into_iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>(), more)
        };
        assert_eq!(names("", false, 2), (vec!["p/1".to_owned(), "p/2".to_owned()], true));
        assert_eq!(names("p/2", true, 2), (vec!["p/3".to_owned()], false));
        assert_eq!(names("p/2", false, 9), (vec!["p/2".to_owned(), "p/3".to_owned()], false));
    }

    #[test]
    fn composing_joins_what_the_generations_name() {
        let mut objects = objects();
        let first = put(&mut objects, "1", None).unwrap();
        put(&mut objects, "2", None).unwrap();
        let sources = [("1".to_owned(), Some(first)), ("2".to_owned(), None)];
        let whole = objects.compose("b", "12", &sources, &About::default(), Condition::default()).unwrap();
        assert_eq!(whole.data, "12");
        put(&mut objects, "1", None).unwrap();
        let answer = objects.compose("b", "12", &sources, &About::default(), Condition::default());
        assert_eq!(answer.unwrap_err(), Refusal::Precondition);
    }
}
