//! Files of parameters: saved, loaded, damaged, and changed by other programs.

use std::path::Path;

use aquifer_device::RequestError;
use aquifer_transfer::TransferError;
use proptest::prelude::*;

use super::*;

/// A file with the given header.
fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

#[test]
fn metadata_stays_with_the_tensors() {
    let (directory, transfer) = (Directory::new(), transfer());
    let mut set = model();
    set.metadata_mut().insert("format".to_owned(), "pt".to_owned());
    let path = directory.0.join("one.safetensors");
    set.to(&transfer).unwrap().wait().unwrap().save_blocking(&path).unwrap();
    let reference = std::fs::read(&path).unwrap();
    let (_, reference) = safetensors::SafeTensors::read_metadata(&reference).unwrap();
    assert_eq!(reference.metadata().as_ref().unwrap()["format"], "pt");
    // A second file with another text.
    let mut more = ParamSet::new();
    more.insert("more", Tensor::from_vec(floats(3, 1), &[3]).unwrap()).unwrap();
    more.metadata_mut()
        .extend([("format", "mlx"), ("step", "12")].map(|(name, text)| (name.to_owned(), text.to_owned())));
    more.save_blocking(directory.0.join("two.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(&directory.0).unwrap();
    let loaded = checkpoint.load_blocking(Place::Host, Load::new()).unwrap();
    for metadata in [checkpoint.metadata(), loaded.metadata()] {
        let texts: Vec<_> = metadata.iter().map(|(name, text)| (&**name, &**text)).collect();
        assert_eq!(texts, [("format", "pt"), ("step", "12")]);
    }
}

/// Several tensors without elements are at one place, before and after one with elements.
#[test]
fn tensors_are_in_the_order_of_their_places_and_names() {
    let names = |prefix: &str| (0..8).map(|number| format!("{prefix}.{}", number * 5 % 8)).collect::<Vec<_>>();
    let (first, last) = (names("b"), names("a"));
    let empty = |names: &[String], at: u32| -> Vec<String> {
        let tensor = |name| format!(r#""{name}":{{"dtype":"F32","shape":[0],"data_offsets":[{at},{at}]}}"#);
        names.iter().map(tensor).collect()
    };
    let full = r#""full":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#.to_owned();
    let header = [empty(&last, 4), vec![full], empty(&first, 0)].concat().join(",");
    let (directory, expected) = (Directory::new(), [first, vec!["full".to_owned()], last].concat());
    let path = directory.0.join("empty.safetensors");
    std::fs::write(&path, raw_file(&format!("{{{header}}}"), &[0; 4])).unwrap();
    for _ in 0..3 {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let lie: Vec<&str> = checkpoint.entries().iter().map(|entry| &*entry.name).collect();
        assert_eq!(lie, expected);
        let loaded = checkpoint.load_blocking(Place::Host, Load::new()).unwrap();
        assert!(loaded.iter().map(|(name, _)| name).eq(&expected));
    }
}

#[cfg(unix)]
#[test]
fn a_saved_file_has_the_permissions_of_the_one_it_replaces() {
    use std::os::unix::fs::PermissionsExt;
    let directory = Directory::new();
    let path = directory.0.join("private.safetensors");
    std::fs::write(&path, "earlier").unwrap();
    for mode in [0o600, 0o640] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        model().save_blocking(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
    }
    assert_eq!(Checkpoint::open(&path).unwrap().bytes(), model().bytes());
}

#[test]
fn files_come_back_as_they_were_saved() {
    let (directory, transfer) = (Directory::new(), transfer());
    let (set, path) = (model(), directory.0.join("model.safetensors"));
    let there = set.to(&transfer).unwrap().wait().unwrap();
    there.save_blocking(&path).unwrap();
    // The reference implementation reads the same.
    let bytes = std::fs::read(&path).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.len(), set.len());
    let bias = reference.tensor("layers.3.bias").unwrap();
    assert_eq!(bias.data(), bytemuck::cast_slice::<f32, u8>(&floats(64, 103)));
    #[allow(unsafe_code, reason = "the test is about mapped files, too")]
    // SAFETY: only this test uses the file.
    let mapped = unsafe { Checkpoint::open_mapped(&path) }.unwrap();
    for checkpoint in [Checkpoint::open(&path).unwrap(), Checkpoint::open(&directory.0).unwrap(), mapped] {
        assert_eq!(checkpoint.bytes(), set.bytes());
        for place in [Place::Host, Place::from(transfer.pinned()), Place::from(&transfer)] {
            let loaded = checkpoint.load_blocking(&place, Load::new()).unwrap();
            assert!(loaded.strays(&place).is_empty());
            assert_same(&set, &loaded);
        }
    }
    quiet(&transfer);
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 1, "nothing else is left there");
}

#[test]
fn parts_are_loaded_and_converted_on_the_way_with_progress() {
    let (directory, transfer) = (Directory::new(), transfer());
    let path = directory.0.join("model.safetensors");
    model().save_blocking(&path).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for (dtype, crossed) in [(DType::BF16, 600_000), (DType::F64, 1_200_000)] {
        let before = transfer.counters().uploads.bytes;
        let mut seen = Vec::new();
        let how = Load::new()
            .filter(|entry| entry.name.starts_with("head.weight") || entry.name == "steps")
            .dtype(dtype)
            .progress(|progress| seen.push((progress.name.to_owned(), progress.bytes_done, progress.bytes_total)));
        let loaded = checkpoint.load_blocking(&transfer, how).unwrap();
        assert_eq!(loaded.len(), 2);
        assert_eq!(loaded.get("steps").unwrap().dtype(), DType::I64);
        let expected: Vec<f64> = match dtype {
            DType::F64 => floats(300_000, 7).into_iter().map(f64::from).collect(),
            _ => floats(300_000, 7).into_iter().map(|float| bf16::from_f32(float).to_f64()).collect(),
        };
        assert!(elements(loaded.get("head.weight").unwrap()) == expected);
        assert_eq!(transfer.counters().uploads.bytes - before, crossed + 8, "{dtype}: the narrower one crosses");
        seen.sort_by_key(|&(_, done, _)| done);
        assert_eq!(seen.last().map(|&(_, done, total)| (done, total)), Some((1_200_008, 1_200_008)));
    }
    quiet(&transfer);
}

#[test]
fn shards_are_found_by_their_index() {
    let (directory, transfer) = (Directory::new(), transfer());
    let all = model();
    let mut shards = [ParamSet::new(), ParamSet::new()];
    let mut map = serde_json::Map::new();
    for (number, (name, tensor)) in all.iter().enumerate() {
        shards[number % 2].insert(name, tensor.clone()).unwrap();
        map.insert(name.to_owned(), format!("part{}.safetensors", number % 2).into());
    }
    for (number, shard) in shards.iter().enumerate() {
        shard.save_blocking(directory.0.join(format!("part{number}.safetensors"))).unwrap();
    }
    let index = |map: &serde_json::Map<String, serde_json::Value>| {
        let text = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string();
        directory.file("model.safetensors.index.json", text.as_bytes())
    };
    let path = index(&map);
    for path in [&directory.0, &path] {
        assert_same(&all, &Checkpoint::open(path).unwrap().load_blocking(&transfer, Load::new()).unwrap());
    }
    let wrong = [
        ("none", "part1.safetensors", "is not in part1.safetensors"),
        ("steps", "../secret.safetensors", "not a file in its directory"),
        ("steps", "/etc/passwd", "not a file in its directory"),
        ("steps", "..", "not a file in its directory"),
        ("more", "part0.safetensors", "\"more\" is not in part0.safetensors"),
    ];
    for (tensor, file, expected) in wrong {
        let mut map = map.clone();
        map.insert(tensor.to_owned(), file.into());
        let error = Checkpoint::open(index(&map)).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected:?}: {error}");
    }
    directory.file("model.safetensors.index.json", b"[1]");
    assert!(Checkpoint::open(&directory.0).unwrap_err().to_string().contains("weight_map"));
    // Two files with one name in them, without an index.
    std::fs::remove_file(&path).unwrap();
    std::fs::copy(directory.0.join("part0.safetensors"), directory.0.join("part2.safetensors")).unwrap();
    assert!(Checkpoint::open(&directory.0).unwrap_err().to_string().contains("is in"));
}

#[test]
fn unknown_dtypes_are_refused_by_name_or_loaded_as_bytes() {
    let (directory, transfer) = (Directory::new(), transfer());
    let header = r#"{"mask":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},"q":{"dtype":"F8_E4M3","shape":[5],"data_offsets":[3,8]},"s":{"dtype":"I16","shape":[2],"data_offsets":[8,12]},"x":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},"f":{"dtype":"F4","shape":[2],"data_offsets":[16,17]}}"#;
    let path = directory.file("m.safetensors", &raw_file(header, &[1; 17]));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let error = checkpoint.load_blocking(&transfer, Load::new()).unwrap_err().to_string();
    assert!(error.contains("\"mask\" is of dtype BOOL") && error.contains("load it as bytes"), "{error}");
    let whole = || Load::new().others_as_bytes();
    let error = checkpoint.load_blocking(&transfer, whole()).unwrap_err().to_string();
    assert!(error.contains("\"f\" is of dtype F4") && error.contains("less than a byte"), "{error}");
    let error =
        checkpoint.load_blocking(&transfer, Load::new().filter(|entry| entry.name == "q")).unwrap_err().to_string();
    assert!(error.contains("\"q\" is of dtype F8_E4M3"), "{error}");
    let how = whole().dtype(DType::I64).filter(|entry| entry.name != "f");
    let loaded = checkpoint.load_blocking(&transfer, how).unwrap();
    let found: Vec<_> = loaded.iter().map(|(name, tensor)| (name, tensor.dtype(), tensor.shape())).collect();
    assert_eq!(
        found,
        [("mask", DType::U8, &[3][..]), ("q", DType::U8, &[5]), ("s", DType::U8, &[2, 2]), ("x", DType::F32, &[1])]
    );
}

#[test]
fn broken_files_are_typed_errors() {
    let directory = Directory::new();
    let good = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let cases: [(Vec<u8>, &str); 15] = [
        (vec![], "ends in its header: 0 bytes"),
        (vec![1, 2, 3], "ends in its header: 3 bytes"),
        (100u64.to_le_bytes().to_vec(), "8 bytes of at least 108"),
        (u64::MAX.to_le_bytes().to_vec(), "more than the 100000000"),
        (raw_file(good, &[0; 7]), "bytes, the file is"),
        (raw_file(good, &[0; 9]), "bytes, the file is"),
        (raw_file("{", &[]), "describes no tensors"),
        (raw_file("[]", &[]), "describes no tensors"),
        (
            raw_file(
                r#"{"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
                &[0; 4],
            ),
            "\"a\" is there twice",
        ),
        (raw_file(r#"{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}"#, &[0; 8]), "F33"),
        (raw_file(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, &[0; 8]), "describes no tensors"),
        (
            raw_file(
                r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}}"#,
                &[0; 8],
            ),
            "describes no tensors",
        ),
        (
            raw_file(r#"{"a":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#, &[0; 8]),
            "describes no tensors",
        ),
        (
            raw_file(r#"{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}"#, &[0; 1]),
            "more than 8 dimensions",
        ),
        (raw_file(r#"{"a..b":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#, &[0; 1]), "empty part"),
    ];
    for (bytes, expected) in cases {
        let error = Checkpoint::open(directory.file("m.safetensors", &bytes)).unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{expected:?}: {error}");
    }
    assert!(matches!(Checkpoint::open(directory.0.join("none")), Err(Error::Transfer(TransferError::File { .. }))));
    let empty = Directory::new();
    assert!(Checkpoint::open(&empty.0).unwrap_err().to_string().contains("no .safetensors file"));
    assert!(matches!(
        model().save_blocking(Path::new("/proc/none/x")),
        Err(Error::Transfer(TransferError::File { .. }))
    ));
}

/// A file that is cut short after it was opened is reported as changed, and no tensor stays.
#[test]
fn a_file_that_shrinks_is_an_error() {
    let (directory, transfer) = (Directory::new(), transfer());
    let path = directory.0.join("m.safetensors");
    model().save_blocking(&path).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 - 1000).unwrap();
    for place in [Place::Host, Place::from(&transfer)] {
        has_changed(checkpoint.load_blocking(&place, Load::new()));
    }
    transfer.device().synchronize().unwrap();
    assert_eq!(transfer.allocator().memory_allocated(), 0);
    std::fs::write(&path, &bytes).unwrap();
    assert_same(&model(), &checkpoint.load_blocking(&transfer, Load::new()).unwrap());
}

/// The same for one that is cut short, or grows, while it is loaded, and for small and large
/// tensors.
#[test]
fn a_file_that_shrinks_while_it_is_loaded_is_an_error() {
    let (directory, transfer) = (Directory::new(), transfer());
    let path = directory.0.join("m.safetensors");
    let mut set = model();
    for number in 0..20 {
        set.insert(format!("large{number}"), Tensor::zeros(&[100_000], DType::F32, Place::Host).unwrap()).unwrap();
    }
    for place in [Place::Host, Place::from(transfer.pinned()), Place::from(&transfer)] {
        set.save_blocking(&path).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        match checkpoint.load_blocking(&place, Load::new().progress(|_| file.set_len(5000).unwrap())) {
            // Threads read ahead for a device, and may have read it all before.
            Ok(loaded) if !place.is_host() => assert_same(&set, &loaded),
            other => has_changed(other),
        }
    }
    set.save_blocking(&path).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    std::fs::OpenOptions::new().append(true).open(&path).unwrap().set_len(checkpoint.bytes() + (1 << 20)).unwrap();
    has_changed(checkpoint.load_blocking(Place::Host, Load::new()));
    transfer.device().synchronize().unwrap();
    assert_eq!(transfer.allocator().memory_allocated(), 0);
}

fn has_changed(loaded: Result<ParamSet, Error>) {
    match loaded {
        Err(Error::Checkpoint { problem, .. }) => assert!(problem.contains("changed after it was opened"), "{problem}"),
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// No file panics: it loads, or is a typed error.
    #[test]
    fn mutated_files_load_or_are_refused(
        changes in prop::collection::vec((0usize..300, any::<u8>()), 0..4), cut in prop::option::of(0usize..300),
        insert in prop::option::of((0usize..200, "[0-9\\[\\]{}\",:-]{1,6}")),
    ) {
        let directory = Directory::new();
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b.c":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"d":{"dtype":"U8","shape":[0],"data_offsets":[26,26]}}"#;
        let mut header = header.to_owned();
        if let Some((at, text)) = insert {
            header.insert_str(at.min(header.len()), &text);
        }
        let mut bytes = raw_file(&header, &[7; 26]);
        for (at, byte) in changes {
            let len = bytes.len();
            bytes[at % len] = byte;
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        let path = directory.file("m.safetensors", &bytes);
        let loaded = Checkpoint::open(&path).and_then(|checkpoint| {
            let entries = checkpoint.entries().len();
            Ok((entries, checkpoint.load_blocking(Place::Host, Load::new().others_as_bytes())?))
        });
        match loaded {
            Ok((entries, set)) => prop_assert_eq!(entries, set.len()),
            Err(error) => prop_assert!(matches!(error, Error::Checkpoint { .. }), "{}", error),
        }
    }
}

/// A few tensors are in flight at a time, so that memory is bounded.
#[test]
fn few_tensors_are_in_flight_while_loading() {
    let directory = Directory::new();
    let path = directory.0.join("m.safetensors");
    for small in [vec![], vec![0], vec![0, 30], (0..60).collect()] {
        let mut set = ParamSet::new();
        for n in 0..60 {
            let large = Tensor::from_vec(floats(40_000, n), &[40_000]).unwrap();
            if small.contains(&n) {
                set.insert(format!("{n:02}.a"), Tensor::from_vec(floats(10, n), &[10]).unwrap()).unwrap();
            }
            set.insert(format!("{n:02}.b"), large).unwrap();
        }
        set.save_blocking(&path).unwrap();
        let transfer = transfer();
        let mut first = None;
        let how = Load::new().progress(|_| {
            first.get_or_insert_with(|| transfer.allocator().memory_allocated());
        });
        let loaded = Checkpoint::open(&path).unwrap().load_blocking(&transfer, how).unwrap();
        assert_same(&set, &loaded);
        let (first, most) = (first.unwrap(), 9 * (160_256 + 512));
        assert!(first <= most, "{} small: {first} bytes are there before anything is complete", small.len());
        quiet(&transfer);
    }
}

#[test]
fn tensors_larger_than_any_file_are_refused_and_their_bytes_saturate() {
    let directory = Directory::new();
    for large in [1 << 61, (1 << 60) + (1 << 59)] {
        let mut set = ParamSet::new();
        for name in ["a", "b"] {
            set.insert(name, Tensor::scalar(1.5f64).unwrap().broadcast(&[large]).unwrap()).unwrap();
        }
        assert_eq!((set.bytes(), set.bytes_by_place()[0].1), (u64::MAX, u64::MAX));
        let error = set.save_blocking(directory.0.join("large")).unwrap_err();
        assert!(matches!(error, Error::Request(RequestError::LengthOverflow { size: 8, .. })), "{error}");
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 0);
    }
}

/// Reads of files are not counted as copies in memory, converted or not.
#[test]
fn loading_files_counts_as_reading() {
    let directory = Directory::new();
    let path = directory.0.join("m.safetensors");
    let mut set = ParamSet::new();
    set.insert("a", Tensor::from_vec(floats(200_000, 1), &[200_000]).unwrap()).unwrap();
    set.save_blocking(&path).unwrap();
    for dtype in [DType::F32, DType::F16] {
        let transfer = transfer();
        let load = || Load::new().dtype(dtype);
        Checkpoint::open(&path).unwrap().load_blocking(&transfer, load()).unwrap();
        let stats = transfer.staging_stats();
        assert!(!stats.time_reading.is_zero() && stats.time_copying.is_zero(), "{dtype:?}: {stats:?}");
        #[allow(unsafe_code, reason = "only the caller knows who writes the file")]
        // SAFETY: nothing writes the file.
        let mapped = unsafe { Checkpoint::open_mapped(&path) }.unwrap();
        mapped.load_blocking(&transfer, load()).unwrap();
        let after = transfer.staging_stats();
        assert!(after.time_reading == stats.time_reading && !after.time_copying.is_zero(), "{dtype:?}: {after:?}");
        quiet(&transfer);
    }
}

#[cfg(unix)]
#[test]
fn pipes_and_directories_are_no_checkpoints() {
    let directory = Directory::new();
    let pipe = directory.0.join("pipe.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for refused in [Checkpoint::open(&pipe), Checkpoint::open(&directory.0)] {
        assert!(refused.unwrap_err().to_string().contains("not a file of a fixed length"));
    }
}
