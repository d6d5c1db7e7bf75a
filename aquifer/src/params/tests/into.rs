//! Loading files into existing sets.

use std::path::Path;

use super::*;

fn saved(set: &ParamSet, directory: &Directory) -> PathBuf {
    let path = directory.0.join("model.safetensors");
    set.save_blocking(&path).unwrap();
    path
}

/// The same set with zeros, each tensor in its given place.
fn zeros_of(set: &ParamSet, place: impl Fn(usize) -> Place) -> ParamSet {
    let mut zeros = ParamSet::new();
    for (number, (name, tensor)) in set.iter().enumerate() {
        zeros.insert(name, Tensor::zeros(tensor.shape(), tensor.dtype(), place(number)).unwrap()).unwrap();
    }
    zeros
}

fn load(path: &Path, set: &mut ParamSet) -> Result<(), Error> {
    Checkpoint::open(path).unwrap().load_into_blocking(set, Load::new())
}

#[test]
fn elements_are_loaded_into_the_memory_of_a_set() {
    let (directory, one, two) = (Directory::new(), transfer(), transfer_of(SimConfig::default().ordinal(1)));
    let path = saved(&model(), &directory);
    let places = [Place::from(&one), Place::Host, Place::from(&two), Place::from(one.pinned())];
    let mut set = zeros_of(&model(), |number| places[number % 4].clone());
    set.metadata_mut().insert("own".to_owned(), "text".to_owned());
    let before = set.clone();
    let mut seen = Vec::new();
    let how = Load::new().progress(|progress| seen.push((progress.bytes_done, progress.bytes_total)));
    Checkpoint::open(&path).unwrap().load_into_blocking(&mut set, how).unwrap();
    assert_same(&model(), &set);
    assert_eq!(set.metadata().len(), 1);
    assert!(seen.len() == set.len() && seen.is_sorted() && seen.last() == Some(&(set.bytes(), set.bytes())));
    for (((name, tensor), (_, old)), number) in set.iter().zip(before.iter()).zip(0..) {
        assert!(tensor.place().is_same(&places[number % 4]), "{name}");
        let on_device = !tensor.place().is_host();
        // On a device all handles of the tensor see it; memory of the host is unchanged.
        assert_eq!(tensor.shares_memory_with(old), on_device, "{name}");
        assert!(on_device || elements(old).iter().all(|&n| n == 0.0), "{name}");
    }
    [one, two].iter().for_each(quiet);
}

#[test]
fn every_tensor_that_does_not_fit_is_named_and_nothing_changes() {
    let (directory, transfer) = (Directory::new(), transfer());
    let path = saved(&model(), &directory);
    let mut set = zeros_of(&model(), |_| Place::from(&transfer));
    drop(set.remove("head.scale").unwrap());
    set.insert("tail.weight", Tensor::zeros(&[2], DType::F32, &transfer).unwrap()).unwrap();
    drop(set.replace("steps", Tensor::zeros(&[1], DType::F32, &transfer).unwrap()).unwrap());
    drop(set.replace("layers.3.bias", Tensor::zeros(&[8, 8], DType::F32, &transfer).unwrap()).unwrap());
    let error = load(&path, &mut set).unwrap_err();
    let Error::Mismatch { missing, unexpected, different } = &error else { panic!("{error}") };
    assert_eq!((&**missing, &**unexpected), (&["tail.weight".to_owned()][..], &["head.scale".to_owned()][..]));
    let text = error.to_string();
    for part in [
        "missing from the files: tail.weight",
        "missing from the set: head.scale",
        "layers.3.bias (F32 [64] in the files, f32 [8, 8] on sim:0 in the set)",
        "steps (I64 [1] in the files, f32 [1] on sim:0 in the set)",
    ] {
        assert!(text.contains(part), "{part:?}: {text}");
    }
    assert_eq!(different.len(), 2);
    assert!(set.iter().all(|(_, tensor)| elements(tensor).iter().all(|&n| n == 0.0)));
    // Tensors that the filter excludes are not expected, and stay.
    let how = Load::new().filter(|entry| entry.name.starts_with("layers.1"));
    drop(set.remove("tail.weight").unwrap());
    Checkpoint::open(&path).unwrap().load_into_blocking(&mut set, how).unwrap();
    let is_zero = |name: &str| elements(set.get(name).unwrap()).iter().all(|&n| n == 0.0);
    assert!(!is_zero("layers.1.weight") && !is_zero("layers.17.bias") && is_zero("layers.2.weight"));
    // Many are listed, in part.
    let text = load(&path, &mut ParamSet::new()).unwrap_err().to_string();
    assert!(text.contains(" and 34 more"), "{text}");
    quiet(&transfer);
}

#[test]
fn views_and_tied_parameters_stay_so() {
    let (directory, transfer) = (Directory::new(), transfer());
    let mut file = ParamSet::new();
    file.insert("embed", Tensor::from_vec(floats(6, 1), &[2, 3]).unwrap()).unwrap();
    file.insert("column", Tensor::from_vec(floats(4, 2), &[4]).unwrap()).unwrap();
    let path = saved(&file, &directory);
    for place in [Place::Host, Place::from(&transfer)] {
        let shared = Tensor::zeros(&[2, 3], DType::BF16, &place).unwrap();
        let block = Tensor::zeros(&[4, 5], DType::F32, &place).unwrap();
        let mut set = ParamSet::new();
        set.insert("embed", shared.clone()).unwrap();
        set.insert("column", block.select(1, 2).unwrap()).unwrap();
        set.insert("head", shared).unwrap(); // not in the file: it is tied
        load(&path, &mut set).unwrap();
        let [embed, head] = ["embed", "head"].map(|name| set.get(name).unwrap());
        assert!(embed.shares_memory_with(head) && embed.dtype() == DType::BF16);
        let expected: Vec<f64> = floats(6, 1).into_iter().map(|n| bf16::from_f32(n).to_f64()).collect();
        assert_eq!((elements(embed), elements(head)), (expected.clone(), expected));
        assert_eq!(set.get("column").unwrap().to_vec::<f32>().unwrap(), floats(4, 2));
        let rest = [block.narrow(1, 0..2).unwrap(), block.narrow(1, 3..5).unwrap()];
        assert!(rest.iter().all(|part| elements(part).iter().all(|&n| n == 0.0)));
    }
    // Two elements of the file for one of the set.
    let one = Tensor::zeros(&[1], DType::F32, &transfer).unwrap();
    let mut set = ParamSet::new();
    set.insert("embed", Tensor::zeros(&[2, 3], DType::F32, &transfer).unwrap()).unwrap();
    set.insert("column", one.broadcast(&[4]).unwrap()).unwrap();
    assert!(matches!(load(&path, &mut set), Err(Error::Operands { .. })));
    assert_eq!(elements(set.get("embed").unwrap()), [0.0; 6]);
    quiet(&transfer);
}

#[test]
fn loading_into_a_set_is_all_or_nothing() {
    let is_zero = |set: &ParamSet| set.iter().all(|(_, tensor)| elements(tensor).iter().all(|&n| n == 0.0));
    let (directory, transfer) = (Directory::new(), transfer());
    // A file that ends while it is read.
    let mut file = ParamSet::new();
    for n in 0..40 {
        file.insert(format!("{n:02}"), Tensor::from_vec(floats(40_000, n), &[40_000]).unwrap()).unwrap();
    }
    let path = saved(&file, &directory);
    let mut set = zeros_of(&file, |_| Place::from(&transfer));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let how = Load::new()
        .progress(|_| std::fs::File::options().write(true).open(&path).unwrap().set_len(4 * 40_000 * 20).unwrap());
    let error = checkpoint.load_into_blocking(&mut set, how).unwrap_err();
    assert!(error.to_string().contains("changed after it was opened"), "{error}");
    assert!(is_zero(&set));
    // Faults at every call of the driver.
    let path = saved(&model(), &directory);
    let mut failed = [0, 0];
    for call in (1..60).chain([80, 120, 160, 200, 240]) {
        let driver = SimDriver::new(SimConfig::default().jitter(false));
        let device = Device::new(driver.clone());
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let transfer = Transfer::new(&allocator).unwrap();
        let mut set = zeros_of(&model(), |_| Place::from(&transfer));
        let mut all_there = false;
        let how = Load::new().progress(|progress| all_there = progress.bytes_done == progress.bytes_total);
        driver.inject(Fault::Nth { operation: None, nth: call, code: Code::OUT_OF_MEMORY });
        let loaded = Checkpoint::open(&path).unwrap().load_into_blocking(&mut set, how);
        driver.clear_faults();
        match loaded {
            Ok(()) => assert_same(&model(), &set),
            Err(_) => failed[usize::from(all_there)] += 1,
        }
        assert!(all_there || is_zero(&set), "call {call}");
        load(&path, &mut set).unwrap();
        assert_same(&model(), &set);
        drop(set);
        device.synchronize().unwrap();
        assert_eq!(allocator.memory_allocated(), 0, "call {call}");
        quiet(&transfer);
    }
    // After a failure of the last copies everything can be loaded again.
    assert!(failed.iter().all(|&calls| calls > 2), "{failed:?}");
}

/// Views with gaps that are transposed cannot be written from row-major elements without further
/// memory.
#[test]
fn out_of_memory_leaves_a_set_of_any_layout_unchanged() {
    const N: u32 = 1024;
    let n = N as usize;
    let (directory, allocator_of) = (Directory::new(), |transfer: &Transfer| transfer.allocator().clone());
    let mut new = ParamSet::new();
    for (name, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        new.insert(name, Tensor::from_vec(floats(N * N, seed), &[n, n]).unwrap()).unwrap();
    }
    let path = saved(&new, &directory);
    let mut outcomes = [0; 2];
    for limit in (20..34).map(|mib| mib << 20) {
        let transfer = transfer();
        let gaps = Tensor::zeros(&[n, n + 1], DType::F32, &transfer).unwrap();
        let mut set = ParamSet::new();
        set.insert("a", Tensor::zeros(&[n, n], DType::F32, &transfer).unwrap()).unwrap();
        set.insert("b", gaps.narrow(1, 0..n).unwrap().transpose(0, 1).unwrap()).unwrap();
        set.insert("c", Tensor::zeros(&[n, n], DType::F32, &transfer).unwrap().transpose(0, 1).unwrap()).unwrap();
        transfer.device().synchronize().unwrap();
        allocator_of(&transfer).empty_cache().unwrap();
        allocator_of(&transfer).set_limit(Some(limit));
        let result = load(&path, &mut set);
        allocator_of(&transfer).set_limit(None);
        match result {
            Ok(()) => assert_same(&new, &set),
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                for (name, tensor) in set.iter() {
                    assert!(elements(tensor).iter().all(|&n| n == 0.0), "{name} was written, {limit}");
                }
            }
        }
        outcomes[usize::from(elements(set.get("a").unwrap())[1] != 0.0)] += 1;
        quiet(&transfer);
    }
    assert!(outcomes.iter().all(|&count| count > 0), "{outcomes:?}");
}
