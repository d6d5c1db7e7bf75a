//! A serializer that writes pickles of protocol 2, the one that PyTorch's own snapshots have.
//!
//! It streams: its memory is the table of strings that were written before, which grows with the
//! number of different strings, up to [`MEMO_MAX`]. Strings that occur again are references to the
//! first one, so that they are one object for the reader.
//!
//! The crate `serde-pickle` 1.2 writes neither such references nor integers of fewer than nine
//! bytes above 2^31. A file with a million trace entries would have 178 MB rather than 56 MB, and
//! PyTorch's memory viewer, which reads integers of more than eight bytes as `BigInt`, could not
//! calculate with the addresses in it. Tests use that crate to read.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};

use serde::ser::{self, Impossible, Serialize};

/// Opcodes of pickles, under Python's names.
mod op {
    pub(super) const PROTO_2: &[u8] = b"\x80\x02";
    pub(super) const STOP: u8 = b'.';
    pub(super) const MARK: u8 = b'(';
    pub(super) const NONE: u8 = b'N';
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const BINGET: u8 = b'h';
    pub(super) const LONG_BINGET: u8 = b'j';
}

/// Number of strings that can be referred to. A snapshot has some 60, and one for each name that
/// the program gave.
const MEMO_MAX: u32 = 1 << 16;

/// Most items of a list that a reader takes at once, as in Python. PyTorch's memory viewer fails at
/// some 100,000.
const BATCH: usize = 1000;

/// Writes `value` as one pickle.
pub(super) fn write(value: &impl Serialize, out: impl Write) -> io::Result<()> {
    let mut pickler = Pickler { out, memo: HashMap::new() };
    pickler.out.write_all(op::PROTO_2)?;
    value.serialize(&mut pickler).map_err(|Error(cause)| cause)?;
    pickler.out.write_all(&[op::STOP])
}

/// An error of the writer, or a value that has no form as a pickle.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct Error(#[from] io::Error);

impl ser::Error for Error {
    fn custom<T: fmt::Display>(text: T) -> Error {
        Error(io::Error::other(text.to_string()))
    }
}

struct Pickler<W> {
    out: W,
    /// Strings with their numbers in the reader's memo.
    memo: HashMap<Box<str>, u32>,
}

impl<W: Write> Pickler<W> {
    fn put(&mut self, opcode: u8, operand: &[u8]) -> Result<(), Error> {
        self.out.write_all(&[opcode])?;
        Ok(self.out.write_all(operand)?)
    }

    /// Writes an opcode that refers to a place of the memo.
    fn put_place(&mut self, short: u8, long: u8, place: u32) -> Result<(), Error> {
        match u8::try_from(place) {
            Ok(place) => self.put(short, &[place]),
            Err(_) => self.put(long, &place.to_le_bytes()),
        }
    }

    fn int(&mut self, value: i128) -> Result<(), Error> {
        if let Ok(byte) = u8::try_from(value) {
            return self.put(op::BININT1, &[byte]);
        }
        if let Ok(short) = u16::try_from(value) {
            return self.put(op::BININT2, &short.to_le_bytes());
        }
        if let Ok(int) = i32::try_from(value) {
            return self.put(op::BININT, &int.to_le_bytes());
        }
        // Two's complement in as few bytes as keep the sign.
        let bits = 129 - if value < 0 { value.leading_ones() } else { value.leading_zeros() };
        let length = bits.div_ceil(8).to_le_bytes()[0];
        self.put(op::LONG1, &[length])?;
        Ok(self.out.write_all(&value.to_le_bytes()[..usize::from(length)])?)
    }

    fn begin(&mut self, opcode: u8, end: u8) -> Result<Items<'_, W>, Error> {
        self.put(opcode, &[])?;
        Ok(Items { pickler: self, end, count: 0 })
    }
}

/// The items of a list, tuple or dictionary.
struct Items<'a, W> {
    pickler: &'a mut Pickler<W>,
    /// The opcode that takes the items since the last mark.
    end: u8,
    count: usize,
}

impl<W: Write> Items<'_, W> {
    /// Begins an item. A tuple is made of all its items at once, after one mark.
    fn item(&mut self) -> Result<(), Error> {
        if self.end != op::TUPLE && self.count.is_multiple_of(BATCH) {
            self.finish()?;
            self.pickler.put(op::MARK, &[])?;
        }
        self.count += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Error> {
        if self.end == op::TUPLE || self.count > 0 { self.pickler.put(self.end, &[]) } else { Ok(()) }
    }
}

impl<W: Write> ser::SerializeSeq for Items<'_, W> {
    type Ok = ();
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.item()?;
        value.serialize(&mut *self.pickler)
    }

    fn end(mut self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeTuple for Items<'_, W> {
    type Ok = ();
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        ser::SerializeSeq::serialize_element(self, value)
    }

    fn end(mut self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeMap for Items<'_, W> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        ser::SerializeSeq::serialize_element(self, key)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        value.serialize(&mut *self.pickler)
    }

    fn end(mut self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeStruct for Items<'_, W> {
    type Ok = ();
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), Error> {
        ser::SerializeMap::serialize_entry(self, key, value)
    }

    fn end(mut self) -> Result<(), Error> {
        self.finish()
    }
}

/// Methods for integers, which a pickle has only one type of.
macro_rules! integers {
    ($($method:ident $integer:ty;)+) => {
        $(fn $method(self, value: $integer) -> Result<(), Error> {
            self.int(value.into())
        })+
    };
}

/// Methods for values that no snapshot has.
macro_rules! unsupported {
    ($($method:ident($($argument:ty),+) -> $result:ty;)+) => {
        $(fn $method(self, $(_: $argument),+) -> Result<$result, Error> {
            Err(<Error as ser::Error>::custom(concat!(stringify!($method), " is not supported")))
        })+
    };
}

impl<'a, W: Write> ser::Serializer for &'a mut Pickler<W> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Items<'a, W>;
    type SerializeTuple = Items<'a, W>;
    type SerializeMap = Items<'a, W>;
    type SerializeStruct = Items<'a, W>;
    type SerializeTupleStruct = Impossible<(), Error>;
    type SerializeTupleVariant = Impossible<(), Error>;
    type SerializeStructVariant = Impossible<(), Error>;

    integers! {
        serialize_i8 i8;
        serialize_i16 i16;
        serialize_i32 i32;
        serialize_i64 i64;
        serialize_u8 u8;
        serialize_u16 u16;
        serialize_u32 u32;
        serialize_u64 u64;
    }

    unsupported! {
        serialize_f32(f32) -> ();
        serialize_char(char) -> ();
        serialize_unit_struct(&'static str) -> ();
        serialize_bytes(&[u8]) -> ();
        serialize_tuple_struct(&'static str, usize) -> Self::SerializeTupleStruct;
        serialize_tuple_variant(&'static str, u32, &'static str, usize) -> Self::SerializeTupleVariant;
        serialize_struct_variant(&'static str, u32, &'static str, usize) -> Self::SerializeStructVariant;
    }

    fn serialize_bool(self, value: bool) -> Result<(), Error> {
        self.put(if value { op::NEWTRUE } else { op::NEWFALSE }, &[])
    }

    fn serialize_f64(self, value: f64) -> Result<(), Error> {
        self.put(op::BINFLOAT, &value.to_be_bytes())
    }

    fn serialize_str(self, text: &str) -> Result<(), Error> {
        if let Some(&place) = self.memo.get(text) {
            return self.put_place(op::BINGET, op::LONG_BINGET, place);
        }
        let length =
            u32::try_from(text.len()).map_err(|_| <Error as ser::Error>::custom("a name is longer than 4 GiB"))?;
        self.put(op::BINUNICODE, &length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())?;
        match u32::try_from(self.memo.len()) {
            Ok(place) if place < MEMO_MAX => {
                self.memo.insert(text.into(), place);
                self.put_place(op::BINPUT, op::LONG_BINPUT, place)
            }
            _ => Ok(()),
        }
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.put(op::NONE, &[])
    }

    fn serialize_unit(self) -> Result<(), Error> {
        self.serialize_none()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Error> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<(), Error> {
        Err(<Error as ser::Error>::custom("serialize_newtype_variant is not supported"))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Items<'a, W>, Error> {
        self.begin(op::EMPTY_LIST, op::APPENDS)
    }

    fn serialize_tuple(self, _: usize) -> Result<Items<'a, W>, Error> {
        self.begin(op::MARK, op::TUPLE)
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Items<'a, W>, Error> {
        self.begin(op::EMPTY_DICT, op::SETITEMS)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Items<'a, W>, Error> {
        self.begin(op::EMPTY_DICT, op::SETITEMS)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn pickled(value: &impl Serialize) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(value, &mut bytes).unwrap();
        bytes
    }

    fn read(pickle: &[u8]) -> Value {
        serde_pickle::from_slice(pickle, serde_pickle::DeOptions::new()).unwrap()
    }

    #[test]
    fn integers_take_as_few_bytes_as_python_gives_them() {
        let written = |value: i128, bytes: &[u8]| {
            let pickle = match u64::try_from(value) {
                Ok(value) => pickled(&value),
                Err(_) => pickled(&i64::try_from(value).unwrap()),
            };
            assert_eq!(pickle, [b"\x80\x02", bytes, b"."].concat(), "{value}");
        };
        written(0, b"K\0");
        written(255, b"K\xff");
        written(256, b"M\0\x01");
        written(65_536, b"J\0\0\x01\0");
        written(-1, b"J\xff\xff\xff\xff");
        written((1 << 31) - 1, b"J\xff\xff\xff\x7f");
        written(1 << 31, b"\x8a\x05\0\0\0\x80\0");
        written(0x7f00_0000_0000, b"\x8a\x06\0\0\0\0\0\x7f");
        written(-(1 << 31) - 1, b"\x8a\x05\xff\xff\xff\x7f\xff");
        written(-(1 << 39), b"\x8a\x05\0\0\0\0\x80");
        written(i128::from(i64::MIN), b"\x8a\x08\0\0\0\0\0\0\0\x80");
        written(i128::from(u64::MAX), b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0");
    }

    #[test]
    fn equal_strings_are_one_object() {
        assert_eq!(pickled(&["ab", "", "ab", ""]), b"\x80\x02(X\x02\0\0\0abq\0X\0\0\0\0q\x01h\0h\x01t.");
    }

    #[test]
    fn many_different_strings_do_not_fill_the_memo() {
        let strings: Vec<String> = (0..MEMO_MAX + 10).map(|number| number.to_string()).collect();
        let twice = [&strings[..], &strings].concat();
        let pickle = pickled(&twice);
        assert_eq!(read(&pickle), json!(twice));
        let placed = pickle.windows(5).filter(|window| window[0] == op::LONG_BINGET && window[3..] == [0, 0]).count();
        assert!(placed >= MEMO_MAX as usize - 256, "{placed}");
    }

    #[test]
    fn long_lists_are_taken_in_batches() {
        for length in [0, 1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH] {
            let list = vec![true; length];
            let pickle = pickled(&list);
            let count = |opcode| pickle.iter().filter(|&&byte| byte == opcode).count();
            assert_eq!((count(op::MARK), count(op::APPENDS)), (length.div_ceil(BATCH), length.div_ceil(BATCH)));
            assert_eq!(read(&pickle), json!(list));
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (0_u32..64, any::<u64>()).prop_map(|(shift, number)| Value::from(number >> 1 >> shift)),
            any::<f64>().prop_filter_map("finite", |number| serde_json::Number::from_f64(number).map(Value::Number)),
            ".{0,4}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                prop::collection::hash_map("[a-c]{0,2}", inner, 0..8).prop_map(|map| map.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn values_are_read_as_they_were_written(value in values()) {
            prop_assert_eq!(read(&pickled(&value)), value);
        }
    }

    #[test]
    fn values_without_a_form_are_errors() {
        let error = write(&'x', io::sink()).unwrap_err();
        assert_eq!(error.to_string(), "serialize_char is not supported");
    }
}
