//! The buckets and the objects in them: generations, conditions, changes. No transport.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, OnceLock},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use serde_json::Value;

/// A larger object's MD5 is worked out only for those who look at its attributes: no transfer waits for it.
const MAX_EAGER_MD5: usize = 1 << 20;

#[derive(Clone, Debug)]
pub struct FakeObject {
    pub generation: i64,
    /// Rises when the attributes change and the content does not.
    pub metageneration: i64,
    pub data: Bytes,
    pub crc32c: u32,
    pub attributes: Attributes,
    /// Of how many objects it was composed.
    pub components: Option<usize>,
    pub created: SystemTime,
    pub updated: SystemTime,
    md5: Arc<OnceLock<[u8; 16]>>,
}

impl FakeObject {
    /// `None` for what was composed: the service has none for these either.
    pub fn md5(&self) -> Option<[u8; 16]> {
        self.components.is_none().then(|| *self.md5.get_or_init(|| md5::compute(&self.data).0))
    }

    /// As [`md5`](Self::md5), unless it would take a while.
    pub fn cheap_md5(&self) -> Option<[u8; 16]> {
        if self.data.len() <= MAX_EAGER_MD5 { self.md5() } else { self.md5.get().copied() }
    }
}

/// What an object has besides its content, and can be given later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    pub content_type: Option<String>,
    pub content_encoding: Option<String>,
    pub content_disposition: Option<String>,
    pub content_language: Option<String>,
    pub cache_control: Option<String>,
    pub metadata: HashMap<String, String>,
}

/// What a writer says about an object besides its content.
#[derive(Clone, Debug, Default)]
pub struct DeclaredAttributes {
    pub attributes: Attributes,
    /// Checked against the content, like the next.
    pub crc32c: Option<u32>,
    pub md5: Option<[u8; 16]>,
}

/// Why a request is not done, in the service's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectRefusal {
    NoBucket,
    NoObject(String),
    /// A bucket that is created once more, or deleted with objects in it.
    Conflict(&'static str),
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
    pub metageneration_is: Option<i64>,
    pub metageneration_is_not: Option<i64>,
}

impl Condition {
    /// Generation 0 stands for an object that does not exist.
    pub fn check(self, current: Option<&FakeObject>) -> Result<(), ObjectRefusal> {
        let generation = current.map_or(0, |object| object.generation);
        let metageneration = current.map_or(0, |object| object.metageneration);
        let differs = |wanted: Option<i64>, found| wanted.is_some_and(|wanted| wanted != found);
        if differs(self.is, generation) || differs(self.metageneration_is, metageneration) {
            return Err(ObjectRefusal::Precondition);
        }
        if self.is_not == Some(generation) || self.metageneration_is_not == Some(metageneration) {
            return Err(ObjectRefusal::NotModified);
        }
        Ok(())
    }

    /// As [`check`](Self::check) before something is changed: there is no "not modified" then.
    pub fn check_change(self, current: Option<&FakeObject>) -> Result<(), ObjectRefusal> {
        match self.check(current) {
            Err(ObjectRefusal::NotModified) => Err(ObjectRefusal::Precondition),
            checked => checked,
        }
    }
}

/// An upload that comes in pieces.
#[derive(Debug)]
pub struct ResumableUpload {
    pub bucket: String,
    pub name: String,
    pub about: DeclaredAttributes,
    pub condition: Condition,
    pub data: Vec<u8>,
    /// The answer, once all bytes were there: it may be asked for again.
    pub done: Option<Value>,
}

type Place = (String, String);

#[derive(Debug)]
pub struct Objects {
    pub(crate) buckets: BTreeSet<String>,
    /// Every bucket anybody names is there.
    is_open: bool,
    pub(crate) objects: BTreeMap<Place, FakeObject>,
    pub uploads: HashMap<String, ResumableUpload>,
    written: HashMap<Place, Instant>,
    write_interval: Option<Duration>,
    last: i64,
}

impl Objects {
    pub fn new(buckets: Vec<String>, write_interval: Option<Duration>) -> Self {
        // Generations of the real service look like microseconds; they are unique over restarts that way, too.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            is_open: buckets.is_empty(),
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

    pub fn begin(&mut self, upload: ResumableUpload) -> String {
        self.last += 1;
        let id = format!("upload-{}", self.last);
        self.uploads.insert(id.clone(), upload);
        id
    }

    pub fn check_bucket(&self, bucket: &str) -> Result<(), ObjectRefusal> {
        if self.is_open || self.buckets.contains(bucket) { Ok(()) } else { Err(ObjectRefusal::NoBucket) }
    }

    pub fn create_bucket(&mut self, bucket: &str) -> Result<(), ObjectRefusal> {
        let is_new = self.buckets.insert(bucket.to_owned());
        if is_new {
            Ok(())
        } else {
            Err(ObjectRefusal::Conflict(
                "Your previous request to create the named bucket succeeded and you already own it.",
            ))
        }
    }

    pub fn delete_bucket(&mut self, bucket: &str) -> Result<(), ObjectRefusal> {
        self.check_bucket(bucket)?;
        if self.objects.keys().any(|(home, _)| home == bucket) {
            return Err(ObjectRefusal::Conflict("The bucket you tried to delete is not empty."));
        }
        if self.buckets.remove(bucket) { Ok(()) } else { Err(ObjectRefusal::NoBucket) }
    }

    pub fn get(&self, bucket: &str, name: &str) -> Result<&FakeObject, ObjectRefusal> {
        self.check_bucket(bucket)?;
        self.find(bucket, name).ok_or_else(|| ObjectRefusal::NoObject(format!("{bucket}/{name}")))
    }

    /// As [`get`](Self::get), of one generation: no others than the live one are kept.
    pub fn get_generation(
        &self,
        bucket: &str,
        name: &str,
        generation: Option<i64>,
    ) -> Result<&FakeObject, ObjectRefusal> {
        let object = self.get(bucket, name)?;
        let is_wanted = generation.is_none_or(|wanted| wanted == object.generation);
        if is_wanted { Ok(object) } else { Err(ObjectRefusal::NoObject(format!("{bucket}/{name}"))) }
    }

    pub fn find(&self, bucket: &str, name: &str) -> Option<&FakeObject> {
        self.objects.get(&(bucket.to_owned(), name.to_owned()))
    }

    pub fn put(
        &mut self,
        bucket: &str,
        name: &str,
        data: Bytes,
        about: &DeclaredAttributes,
        condition: Condition,
    ) -> Result<FakeObject, ObjectRefusal> {
        self.store(bucket, name, data, about, condition, None)
    }

    fn store(
        &mut self,
        bucket: &str,
        name: &str,
        data: Bytes,
        about: &DeclaredAttributes,
        condition: Condition,
        components: Option<usize>,
    ) -> Result<FakeObject, ObjectRefusal> {
        if name.is_empty() {
            return Err(ObjectRefusal::Invalid("Required parameter: name"));
        }
        self.check_bucket(bucket)?;
        condition.check_change(self.find(bucket, name))?;
        let place = (bucket.to_owned(), name.to_owned());
        let too_soon = |interval| self.written.get(&place).is_some_and(|written| written.elapsed() < interval);
        if self.write_interval.is_some_and(too_soon) {
            return Err(ObjectRefusal::TooMany);
        }
        let crc32c = crc32c::crc32c(&data);
        if about.crc32c.is_some_and(|said| said != crc32c) {
            return Err(ObjectRefusal::Invalid("Provided CRC32C doesn't match calculated CRC32C."));
        }
        let md5 = OnceLock::new();
        if let Some(said) = about.md5
            && said != *md5.get_or_init(|| md5::compute(&data).0)
        {
            return Err(ObjectRefusal::Invalid("Provided MD5 hash doesn't match calculated MD5 hash."));
        }
        self.last += 1;
        let now = SystemTime::now();
        let object = FakeObject {
            generation: self.last,
            metageneration: 1,
            data,
            crc32c,
            attributes: about.attributes.clone(),
            components,
            created: now,
            updated: now,
            md5: Arc::new(md5),
        };
        self.written.insert(place.clone(), Instant::now());
        self.buckets.insert(bucket.to_owned());
        self.objects.insert(place, object.clone());
        Ok(object)
    }

    pub fn force(&mut self, bucket: &str, name: &str, data: Bytes) {
        let interval = self.write_interval.take();
        let stored = self.put(bucket, name, data, &DeclaredAttributes::default(), Condition::default());
        self.write_interval = interval;
        debug_assert!(stored.is_ok(), "no bucket {bucket}");
    }

    pub fn delete(&mut self, bucket: &str, name: &str, condition: Condition) -> Result<(), ObjectRefusal> {
        condition.check_change(Some(self.get(bucket, name)?))?;
        self.objects.remove(&(bucket.to_owned(), name.to_owned()));
        Ok(())
    }

    /// Other attributes for the same content.
    pub fn patch(
        &mut self,
        bucket: &str,
        name: &str,
        condition: Condition,
        change: impl FnOnce(&mut Attributes),
    ) -> Result<FakeObject, ObjectRefusal> {
        condition.check_change(Some(self.get(bucket, name)?))?;
        let place = (bucket.to_owned(), name.to_owned());
        let object = self.objects.get_mut(&place).ok_or(ObjectRefusal::Unavailable)?;
        change(&mut object.attributes);
        object.metageneration += 1;
        object.updated = SystemTime::now();
        Ok(object.clone())
    }

    /// Up to 32 objects one after the other, as a new one.
    pub fn compose(
        &mut self,
        bucket: &str,
        name: &str,
        sources: &[(String, Condition)],
        about: &DeclaredAttributes,
        condition: Condition,
    ) -> Result<FakeObject, ObjectRefusal> {
        if sources.is_empty() || sources.len() > 32 {
            return Err(ObjectRefusal::Invalid("The number of source components must be between 1 and 32."));
        }
        let (mut data, mut components) = (Vec::new(), 0);
        for (source, condition) in sources {
            let object = self.get(bucket, source)?;
            condition.check_change(Some(object))?;
            data.extend_from_slice(&object.data);
            components += object.components.unwrap_or(1);
        }
        self.store(bucket, name, data.into(), about, condition, Some(components))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects() -> Objects {
        Objects::new(vec!["b".to_owned()], None)
    }

    fn is(generation: i64) -> Condition {
        Condition { is: Some(generation), ..Condition::default() }
    }

    fn put(objects: &mut Objects, name: &str, wanted: Option<i64>) -> Result<i64, ObjectRefusal> {
        let condition = Condition { is: wanted, ..Condition::default() };
        objects
            .put("b", name, name.as_bytes().to_vec().into(), &DeclaredAttributes::default(), condition)
            .map(|o| o.generation)
    }

    #[test]
    fn generations_decide_who_may_write() {
        let mut objects = objects();
        let first = put(&mut objects, "a", Some(0)).unwrap();
        assert_eq!(put(&mut objects, "a", Some(0)), Err(ObjectRefusal::Precondition));
        let second = put(&mut objects, "a", Some(first)).unwrap();
        assert_ne!(first, second);
        assert_eq!(objects.delete("b", "a", is(first)), Err(ObjectRefusal::Precondition));
        let unchanged = Condition { is_not: Some(second), ..Condition::default() };
        assert_eq!(unchanged.check(objects.find("b", "a")), Err(ObjectRefusal::NotModified));
        assert_eq!(
            objects.delete("b", "a", unchanged),
            Err(ObjectRefusal::Precondition),
            "only a read is not modified"
        );
        objects.delete("b", "a", Condition::default()).unwrap();
        assert!(matches!(objects.delete("b", "a", Condition::default()), Err(ObjectRefusal::NoObject(_))));
        assert_eq!(objects.get("c", "a").unwrap_err(), ObjectRefusal::NoBucket);
    }

    #[test]
    fn other_attributes_are_another_metageneration_of_the_same_generation() {
        let mut objects = objects();
        let first = put(&mut objects, "a", None).unwrap();
        let condition = Condition { metageneration_is: Some(1), ..Condition::default() };
        let change = |attributes: &mut Attributes| attributes.content_type = Some("text/plain".to_owned());
        let patched = objects.patch("b", "a", condition, change).unwrap();
        assert_eq!((patched.generation, patched.metageneration), (first, 2));
        assert_eq!(objects.patch("b", "a", condition, change).unwrap_err(), ObjectRefusal::Precondition);
    }

    #[test]
    fn a_second_write_within_the_interval_is_too_many_and_changes_nothing() {
        let mut objects = Objects::new(Vec::new(), Some(Duration::from_secs(3600)));
        let first = put(&mut objects, "a", None).unwrap();
        assert_eq!(put(&mut objects, "a", None), Err(ObjectRefusal::TooMany));
        assert_eq!(put(&mut objects, "a", Some(1)), Err(ObjectRefusal::Precondition), "the condition comes first");
        assert_eq!(objects.get("b", "a").unwrap().generation, first);
        put(&mut objects, "other", None).unwrap();
    }

    #[test]
    fn content_that_is_not_what_its_writer_says_is_refused() {
        let wrong = [
            DeclaredAttributes { crc32c: Some(1), ..DeclaredAttributes::default() },
            DeclaredAttributes { md5: Some([0; 16]), ..DeclaredAttributes::default() },
        ];
        for about in wrong {
            let answer = objects().put("b", "a", Bytes::from_static(b"x"), &about, Condition::default());
            assert!(matches!(answer, Err(ObjectRefusal::Invalid(_))));
        }
    }

    #[test]
    fn composing_joins_what_the_generations_name() {
        let mut objects = objects();
        let first = put(&mut objects, "1", None).unwrap();
        put(&mut objects, "2", None).unwrap();
        let sources = [("1".to_owned(), is(first)), ("2".to_owned(), Condition::default())];
        let whole = objects.compose("b", "12", &sources, &DeclaredAttributes::default(), Condition::default()).unwrap();
        assert_eq!((whole.data.as_ref(), whole.components, whole.md5()), (b"12".as_slice(), Some(2), None));
        put(&mut objects, "1", None).unwrap();
        let answer = objects.compose("b", "12", &sources, &DeclaredAttributes::default(), Condition::default());
        assert_eq!(answer.unwrap_err(), ObjectRefusal::Precondition);
    }

    #[test]
    fn a_bucket_goes_only_when_it_is_empty() {
        let mut objects = objects();
        assert!(matches!(objects.create_bucket("b"), Err(ObjectRefusal::Conflict(_))));
        objects.create_bucket("c").unwrap();
        put(&mut objects, "a", None).unwrap();
        assert!(matches!(objects.delete_bucket("b"), Err(ObjectRefusal::Conflict(_))));
        objects.delete_bucket("c").unwrap();
        assert_eq!(objects.delete_bucket("c"), Err(ObjectRefusal::NoBucket));
    }
}
