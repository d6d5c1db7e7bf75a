//! Sets that move; files have a module of their own.

mod files;
mod into;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_allocator::Config;
use aquifer_device::{Code, Device, Operation};
use aquifer_kernels::DType;
use aquifer_sim::{Fault, SimConfig, SimDriver};
use half::bf16;

use super::*;
use crate::allocator::Allocator;
use crate::error::Error;
use crate::tensor::{Place, Tensor, To};
use crate::transfer::Transfer;

fn transfer_of(config: SimConfig) -> Transfer {
    let device = Device::new(SimDriver::new(config));
    Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap()
}

fn transfer() -> Transfer {
    transfer_of(SimConfig::default().jitter(false))
}

fn quiet(transfer: &Transfer) {
    assert_eq!(transfer.device().driver().take_violation(), None);
}

fn floats(len: u32, seed: u32) -> Vec<f32> {
    (0..len).map(|n| n.wrapping_mul(2_654_435_761).wrapping_add(seed) as f32 / 1e6).collect()
}

fn model() -> ParamSet {
    let mut set = ParamSet::new();
    for layer in 0..20 {
        let weight = Tensor::from_vec(floats(64 * 64, layer), &[64, 64]).unwrap();
        set.insert(format!("layers.{layer}.weight"), weight).unwrap();
        set.insert(format!("layers.{layer}.bias"), Tensor::from_vec(floats(64, layer + 100), &[64]).unwrap()).unwrap();
    }
    set.insert("head.weight", Tensor::from_vec(floats(300_000, 7), &[300, 1000]).unwrap()).unwrap();
    set.insert("head.scale", Tensor::scalar(2.5f64).unwrap()).unwrap();
    set.insert("none", Tensor::zeros(&[0, 4], DType::F32, Place::Host).unwrap()).unwrap();
    set.insert("steps", Tensor::from_vec(vec![123_456_789_012i64], &[1]).unwrap()).unwrap();
    set
}

fn elements(tensor: &Tensor) -> Vec<f64> {
    tensor.to_with(Place::Host, To::new().dtype(DType::F64)).unwrap().wait().unwrap().to_vec().unwrap()
}

fn assert_same(a: &ParamSet, b: &ParamSet) {
    assert_eq!(a.len(), b.len());
    for (name, tensor) in a.iter() {
        let other = b.get(name).unwrap();
        assert_eq!((other.dtype(), other.shape()), (tensor.dtype(), tensor.shape()), "{name}");
        assert_eq!(elements(other), elements(tensor), "{name}");
    }
}

/// A directory that is removed when the test ends.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Directory {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("aquifer-params-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn names_are_unique_and_have_no_empty_parts() {
    let mut set = ParamSet::new();
    let one = Tensor::scalar(1u8).unwrap();
    set.insert("a.b", one.clone()).unwrap();
    for name in ["a.b", "", "a.", ".b", "a..b", "__metadata__"] {
        assert!(matches!(set.insert(name, one.clone()), Err(Error::ParamName { .. })), "{name:?}");
    }
    assert_eq!((set.len(), set.bytes()), (1, 1));
    assert!(set.replace("x", one.clone()).is_err());
    assert!(set.replace("a.b", Tensor::scalar(2u8).unwrap()).unwrap().shares_memory_with(&one));
    for name in ["c", "d", "e"] {
        set.insert(name, one.clone()).unwrap();
    }
    assert!(set.remove("c").unwrap().shares_memory_with(&one));
    assert!(set.remove("c").is_none() && set.get("c").is_none() && set.remove("").is_none());
    let names = |set: &ParamSet| set.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(&set), ["a.b", "d", "e"]);
    for name in ["a.b", "d", "e"] {
        let tensor = set.get(name).unwrap().clone();
        assert!(set.replace(name, tensor).is_ok());
    }
    set.insert("c", one).unwrap();
    assert_eq!(names(&set), ["a.b", "d", "e", "c"]);
}

#[test]
fn a_set_moves_coalesced_and_in_order() {
    let transfer = transfer();
    let (mut set, host) = (model(), model());
    let copies = |transfer: &Transfer| transfer.device().driver_calls().of(Operation::CopyToDevice);
    let before = copies(&transfer);
    let mut seen = Vec::new();
    let total = set.bytes();
    set.move_with_blocking(&transfer, To::new(), |progress| {
        seen.push((progress.name.to_owned(), progress.bytes_done));
        assert_eq!(progress.bytes_total, total);
    })
    .unwrap();
    let names: Vec<String> = host.iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(seen.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), names);
    assert!(seen.is_sorted_by_key(|(_, done)| *done) && seen.last().unwrap().1 == total);
    // 42 small tensors as one batch, the large one by itself in pieces.
    assert!(copies(&transfer) - before < 30, "{}", copies(&transfer) - before);
    assert_same(&host, &set);
    set.check_all_on(&transfer).unwrap();
    assert_eq!(set.bytes_by_place().len(), 1);
    let back = set.to(Place::Host).unwrap().wait().unwrap();
    assert_same(&host, &back);
    quiet(&transfer);
}

#[test]
fn dtypes_of_weights_change_and_counters_stay() {
    let transfer = transfer();
    let mut set = model();
    set.move_with_blocking(&transfer, To::new().dtype(DType::BF16), |_| {}).unwrap();
    for (name, tensor) in set.iter() {
        assert_eq!(tensor.dtype(), if name == "steps" { DType::I64 } else { DType::BF16 }, "{name}");
    }
    assert_eq!(set.get("steps").unwrap().item::<i64>().unwrap(), 123_456_789_012);
    let weight: Vec<bf16> = set.get("head.weight").unwrap().to_vec().unwrap();
    let expected: Vec<bf16> = floats(300_000, 7).into_iter().map(bf16::from_f32).collect();
    assert!(weight == expected);
    quiet(&transfer);
}

#[test]
fn tied_parameters_stay_tied() {
    let transfer = transfer();
    let mut set = ParamSet::new();
    let shared = Tensor::from_vec(floats(100_000, 1), &[100_000]).unwrap();
    set.insert("embed", shared.clone()).unwrap();
    set.insert("head", shared).unwrap();
    set.move_blocking(&transfer).unwrap();
    assert!(set.get("embed").unwrap().shares_memory_with(set.get("head").unwrap()));
    assert_eq!(transfer.allocator().memory_allocated(), 400_000u64.next_multiple_of(512));
}

/// Weights that share one matrix, and views of them.
#[test]
fn parts_of_one_buffer_are_tied_only_where_they_are_the_same_part() {
    let transfer = transfer();
    let all = transfer.allocator().from_slice(&floats(3000, 1), transfer.device().default_stream()).unwrap();
    let part = |start: usize| Tensor::from_buffer(&all.slice(start..start + 1000), &[1000]).unwrap();
    let whole = Tensor::from_buffer(&all, &[3000]).unwrap();
    let mut set = ParamSet::new();
    for (name, tensor) in [("query", part(0)), ("key", part(1000)), ("value", part(2000))] {
        set.insert(name, tensor).unwrap();
    }
    set.insert("key again", whole.narrow(0, 1000..2000).unwrap()).unwrap();
    let host = set.to(Place::Host).unwrap().wait().unwrap();
    assert_same(&set, &host);
    let shares = |a: &str, b: &str| host.get(a).unwrap().shares_memory_with(host.get(b).unwrap());
    assert!(shares("key", "key again") && !shares("query", "key") && !shares("key", "value"));
    quiet(&transfer);
}

#[test]
fn tensors_in_other_places_are_reported() {
    let transfer = transfer();
    let mut set = model();
    set.move_blocking(&transfer).unwrap();
    set.insert("added.later", Tensor::scalar(1.0f32).unwrap()).unwrap();
    let error = set.check_all_on(&transfer).unwrap_err();
    assert_eq!(error.to_string(), "some parameters are not on sim:0: added.later (4 bytes on cpu)");
    assert_eq!(
        set.bytes_by_place().iter().map(|(place, bytes)| (place.to_string(), *bytes)).next_back(),
        Some(("cpu".to_owned(), 4))
    );
}

/// After any failure the set is unchanged, and new memory is released.
#[test]
fn moving_is_all_or_nothing() {
    let mut failed = 0;
    for call in (1..60).chain([80, 120]) {
        let driver = SimDriver::new(SimConfig::default().jitter(false));
        let device = Device::new(driver.clone());
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let transfer = Transfer::new(&allocator).unwrap();
        let (mut set, host) = (model(), model());
        driver.inject(Fault::Nth { operation: None, nth: call, code: Code::OUT_OF_MEMORY });
        let moved = set.move_with_blocking(&transfer, To::new().dtype(DType::F64), |_| {});
        driver.clear_faults();
        if moved.is_err() {
            failed += 1;
            assert!(set.strays(Place::Host).is_empty(), "call {call}");
            assert_same(&host, &set);
            device.synchronize().unwrap();
            assert_eq!(allocator.memory_allocated(), 0, "call {call}");
        }
        drop(moved);
        set.move_blocking(&transfer).unwrap();
        assert!(set.strays(&transfer).is_empty());
        quiet(&transfer);
    }
    assert!(failed > 5, "{failed}");
}

/// Small tensors use little pinned memory at a time.
#[test]
fn many_small_tensors_need_little_page_locked_memory() {
    let transfer = transfer();
    let mut set = ParamSet::new();
    for n in 0..400 {
        set.insert(format!("adapter.{n}"), Tensor::from_vec(floats(15_000, n), &[15_000]).unwrap()).unwrap();
    }
    let host = set.clone();
    transfer.pinned().set_limit(Some(12 << 20));
    set.move_blocking(&transfer).unwrap();
    transfer.pinned().set_limit(None);
    assert_same(&host, &set);
    quiet(&transfer);
}

#[test]
fn a_set_too_large_for_the_device_is_unchanged() {
    let transfer = transfer_of(SimConfig::parse("32MiB").unwrap());
    let mut set = ParamSet::new();
    for layer in 0..5 {
        set.insert(format!("layer{layer}"), Tensor::from_vec(floats(2 << 20, layer), &[2 << 20]).unwrap()).unwrap();
    }
    let error = set.move_blocking(&transfer).unwrap_err();
    assert!(error.is_out_of_memory() && set.strays(Place::Host).is_empty(), "{error}");
    transfer.device().synchronize().unwrap();
    assert_eq!(transfer.allocator().memory_allocated(), 0);
}

/// Without a driver call for many copies, there is one call for each.
#[test]
fn small_tensors_move_on_the_default_stream_too() {
    let (transfer, directory) = (transfer(), Directory::new());
    let stream = transfer.device().default_stream();
    let on_default = transfer.on(stream).unwrap();
    let path = directory.0.join("model.safetensors");
    model().save_blocking(&path).unwrap();
    let mut moved = [model(), model()];
    moved[0].move_blocking(&on_default).unwrap();
    moved[1].move_with_blocking(&transfer, To::new().stream(stream), |_| {}).unwrap();
    let loaded = Checkpoint::open(&path).unwrap().load_blocking(&on_default, Load::new()).unwrap();
    moved.iter().chain([&loaded]).for_each(|set| assert_same(&model(), set));
    quiet(&transfer);
}
