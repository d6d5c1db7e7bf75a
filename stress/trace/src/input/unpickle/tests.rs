//! Pickles opcode by opcode.

use super::super::arena::Word;
use super::*;

/// Runs a pickle that is not compressed.
fn run(pickle: &[u8]) -> Result<(Value, Arena), Fault> {
    super::run(pickle, &Allowance::read(pickle.len(), pickle.len()))
}

fn error(pickle: &[u8]) -> String {
    run(pickle).map(|_| ()).unwrap_err().at("p".as_ref()).to_string()
}

#[test]
fn numbers() {
    for (pickle, expected) in [
        (&b"\x80\x02K\xff."[..], 255),
        (b"M\x01\x02.", 513),
        (b"J\xff\xff\xff\xff.", u64::MAX),
        (b"\x8a\x00.", 0),
        (b"\x8a\x01\x80.", (-128i64).cast_unsigned()),
        (b"\x8a\x06\x00\x00\x00\x00\x00\x7f.", 0x7f00_0000_0000),
        (b"\x8a\x09\x01\x00\x00\x00\x00\x00\x00\x80\x00.", (1 << 63) + 1),
        // 512.0
        (b"G\x40\x80\0\0\0\0\0\0.", 512),
    ] {
        assert_eq!(run(pickle).unwrap().0, Value::Int(expected));
    }
    for other in
        [&b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."[..], b"G\x3f\xf8\0\0\0\0\0\0.", b"G\x7f\xf8\0\0\0\0\0\0."]
    {
        assert!(matches!(run(other).unwrap().0, Value::Other(_)), "2^64, 1.5, not a number");
    }
}

#[test]
fn containers() {
    let (value, mut arena) = run(&b"}(X\x04\0\0\0size\x94K\x07\x8c\x05other](K\x01Neh\0K\x08u."[..]).unwrap();
    let Value::Dict(dict) = value else { panic!("{value:?}") };
    assert_eq!(arena.get(dict, Word::Size), Some(Value::Int(8)));
    assert_eq!(arena.get(dict, Word::Addr), None);
    assert!(matches!(arena.take(0)[..], [Value::Int(1), Value::Other(_)]));
    assert_eq!(arena.take(0), []);
    assert_eq!(arena.keys(), ["\"size\"", "\"other\"", "\"size\""]);
    let (value, arena) = run(&b"K\0K\0\x86."[..]).unwrap();
    assert!(matches!(value, Value::List(pair) if arena.is_zeros(pair)));
}

#[test]
fn equal_content_has_equal_digests() {
    let digest = |pickle: &[u8]| {
        let (value, arena) = run(pickle).unwrap();
        arena.digest(value)
    };
    // [{"a": 1, "b": "x"}], its dictionary shared, in another order, and filled in two steps.
    let frame = b"}(\x8c\x01aK\x01\x8c\x01b\x8c\x01xu";
    let once = digest(&[&b"](N"[..], frame, b"e."].concat());
    for same in [
        [&frame[..], b"\x940](Nh\0e."].concat(),
        b"](N}(\x8c\x01b\x8c\x01x\x8c\x01aK\x01ue.".to_vec(),
        b"]Na}\x8c\x01aK\x01s\x8c\x01b\x8c\x01xsa.".to_vec(),
    ] {
        assert_eq!(digest(&same), once);
    }
    for other in
        [&b"](N}(\x8c\x01aK\x02\x8c\x01b\x8c\x01xue."[..], b"](}(\x8c\x01aK\x01\x8c\x01b\x8c\x01xuNe.", b"](Ne."]
    {
        assert_ne!(digest(other), once);
    }
    assert_eq!((digest(b"]."), digest(b"}.")), (0, 0));
}

#[test]
fn objects_of_classes_are_skipped() {
    let dict = |pickle: &[u8]| {
        let (value, arena) = run(pickle).unwrap();
        let Value::Dict(dict) = value else { panic!("{value:?}") };
        arena.get(dict, Word::Size)
    };
    // Dictionaries with a default, of two protocols, and with an order.
    for pickle in [
        &b"\x80\x04\x8c\x0bcollections\x8c\x0bdefaultdict\x93\x8c\x08builtins\x8c\x04list\x93\x85R(\x8c\x04sizeK\x07u."
            [..],
        b"\x80\x02ccollections\ndefaultdict\nq\x00c__builtin__\nint\n\x85Rq\x01X\x04\0\0\0sizeK\x07s.",
        b"\x80\x04\x8c\x0bcollections\x8c\x0bOrderedDict\x93)R\x8c\x04sizeK\x07s.",
    ] {
        assert_eq!(dict(pickle), Some(Value::Int(7)));
    }
    // Nothing runs, and the content of objects is not kept.
    for pickle in [
        &b"\x80\x02cos\nsystem\nX\x05\0\0\0false\x85R."[..],
        b"\x80\x04\x8c\x01m\x8c\x01C\x93)\x81}\x8c\x01aK\x01sb.",
        b"\x80\x04\x8f(K\x01K\x02\x90.",
        b"\x80\x04(K\x01\x91.",
        b"\x80\x04\x8c\x01m\x8c\x01C\x93)R(K\x01K\x02e(K\x01K\x02u.",
        b"\x80\x03C\x02ab.",
    ] {
        assert!(matches!(run(pickle).unwrap().0, Value::Other(_)), "{pickle:?}");
    }
}

/// `count` times `item`, in a list.
fn list_of(item: &[u8], count: usize) -> Vec<u8> {
    [&b"]("[..], &item.repeat(count)[..], b"e."].concat()
}

#[test]
fn of_long_lists_of_numbers_only_the_first_are_kept() {
    let batches = b"(K\x01K\x02K\x03K\x04e".repeat(1 << 20);
    let (value, mut arena) = super::run(&[&b"]"[..], &batches, b"."].concat()[..], &Allowance::default()).unwrap();
    assert_eq!(value, Value::List(0));
    assert_eq!(arena.take(0), [Value::Int(1), Value::Int(2), Value::Int(3), Value::Other(0)]);
    assert!(arena.bytes() < 1000);
}

#[test]
fn values_take_little_memory_for_few_stored_bytes() {
    for item in [&b"K\x01"[..], b"N", b"]", b"}", b"N\x94"] {
        // With a text, as it takes more than its bytes allow without any.
        let pickle = list_of(&[item, b"\x8c\x0cnot so dense"].concat(), 3 << 20);
        assert!(run(&pickle).is_ok());
        let allowance = Allowance::read(pickle.len() / 1000, pickle.len());
        let fault = super::run(&pickle[..], &allowance).map(|_| ()).unwrap_err().at("p".as_ref()).to_string();
        assert!(fault.contains(" bytes of the file hold more than"), "{fault}");
    }
}

#[test]
fn uncompressed_values_take_little_memory_too() {
    for dense in [&b"\x85"[..], b"]", b")"] {
        let pickle = [b"]", &dense.repeat(3 << 20)[..], b"."].concat();
        assert!(error(&pickle).contains(" bytes of the file hold more than"), "{dense:?}");
    }
}

#[test]
fn a_list_within_itself_is_harmless() {
    let (value, mut arena) = run(&b"]\x94h\0a."[..]).unwrap();
    assert_eq!((value, arena.take(0)), (Value::List(0), vec![Value::List(0)]));
    assert!(run(&[&[b']'; 1 << 18][..], b"."].concat()[..]).is_ok());
}

#[test]
fn errors_name_opcode_and_byte() {
    for (pickle, expected) in [
        (&b"\x80\x02I7\n."[..], "p:byte 2: unsupported pickle opcode 0x49"),
        (b"\x80\x00", "p:byte 0: damaged pickle: only the protocols 2 to 5 are supported"),
        (b"]X\xff\xff\xff\xffab", "p:byte 1: damaged pickle: it ends early"),
        (b"cos\nsyst", "p:byte 0: damaged pickle: it ends early"),
        (b".", "p:byte 0: damaged pickle: a value is missing"),
        (b"NR.", "p:byte 1: damaged pickle: a value is missing"),
        (b"](Na.", "p:byte 3: damaged pickle: an opcode does not fit what it is applied to"),
        (b"N.N", "p:byte 1: damaged pickle: something follows its end"),
        (b"N.\0\0\0\0", "p:byte 1: damaged pickle: something follows its end"),
        (b"]Nb(s.", "p:byte 4: damaged pickle: a value is missing"),
        (b"Na", "p:byte 1: damaged pickle: an opcode does not fit what it is applied to"),
        (b"}(Nu.", "p:byte 3: damaged pickle: an opcode does not fit what it is applied to"),
        (b"e", "p:byte 0: damaged pickle: a mark is missing"),
        (b"(h\x00", "p:byte 1: damaged pickle: an object is used before it is memoised"),
    ] {
        assert_eq!(error(pickle), expected);
    }
    assert!(run(b"N.\0\0\0").is_ok(), "PyTorch pads pickles");
}

#[test]
fn objects_are_memoised_in_order() {
    assert_eq!(run(&b"K\x05r\0\0\0\0K\x06q\0j\0\0\0\0."[..]).unwrap().0, Value::Int(6));
    let sparse = error(b"K\x05r\xff\xff\xff\xff.");
    assert_eq!(sparse, "p:byte 2: damaged pickle: an object is memoised out of order");
}
