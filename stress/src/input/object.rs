//! JSON objects, and nothing else in their place.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};

/// What is read from an object.
pub(crate) trait FromObject {
    /// What a reader of the file would call it.
    const NAME: &'static str;
}

/// Read from an object alone. An implementation that is derived also takes a list, of the values in
/// the order of the fields, and tells of what it wants by the names of Rust's types.
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de> + FromObject> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(VisitObject(PhantomData))
    }
}

struct VisitObject<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + FromObject> Visitor<'de> for VisitObject<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, which is an object", T::NAME)
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<Object<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(entries)).map(Object)
    }
}
