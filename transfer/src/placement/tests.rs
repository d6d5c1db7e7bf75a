//! Choices, and their messages.

use aquifer_allocator::Config;
use aquifer_device::sim::{Fault, SimConfig, SimDriver};
use aquifer_device::{Code, DriverKind, Operation};

use super::*;

fn open(text: &str) -> Device {
    Device::new(SimDriver::new(SimConfig::parse(text).unwrap()))
}

#[test]
fn the_device_with_the_most_free_memory_is_chosen_and_reported() {
    let devices = [open("16GiB"), open("48GiB"), open("24GiB")];
    let held = devices[1].alloc(40 << 30).unwrap();
    let chosen = Placement::new().bytes(4 << 30).choose(&devices).unwrap();
    assert_eq!((chosen.index(), chosen.device().unwrap().id()), (Some(2), devices[2].id()));
    let text = chosen.to_string();
    assert!(text.contains("24.00 GiB free") && text.contains("would serve, with 8.00 GiB free"), "{text}");
    devices[1].free(held).unwrap();
    assert_eq!(Placement::new().choose(&devices).unwrap().index(), Some(1));
    // Equal ones: the first.
    assert_eq!(Placement::new().choose(&[open("8GiB"), open("8GiB")]).unwrap().index(), Some(0));
}

#[test]
fn the_error_without_a_device_has_the_reasons_of_each() {
    let devices = [open("8GiB"), open("16GiB")];
    let needs = Placement::new().bytes(20 << 30).capability((99, 0));
    let error = needs.choose(&devices).unwrap_err();
    let TransferError::NoDevice(no_device) = &error else { panic!("{error}") };
    assert_eq!(no_device.verdicts.len(), 2);
    for part in ["8.00 GiB free of the 20.00 GiB needed", "16.00 GiB free", "99.0 is needed"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    assert!(Placement::new().choose::<Device>(&[]).unwrap_err().to_string().contains("none was given"));
}

/// Silent CPU tensors: the host is never chosen unless the caller wrote that it may be.
#[test]
fn the_host_is_chosen_only_where_the_caller_wrote_it() {
    let devices = [open("1GiB")];
    let needs = Placement::new().bytes(2 << 30);
    assert!(needs.choose(&devices).is_err());
    let chosen = needs.fallback(Fallback::Host).choose(&devices).unwrap();
    assert!(chosen.device().is_none() && chosen.to_string().contains("the host, as no device serves"), "{chosen}");
    // And not where a device serves.
    assert!(Placement::new().fallback(Fallback::Host).choose(&devices).unwrap().device().is_some());
}

#[test]
fn lacking_instructions_of_older_devices_are_named() {
    let judged = |capability, driver| {
        let mut info = open("8GiB").info().clone();
        (info.compute_capability, info.driver_version) = (capability, Some(driver));
        let needs = Placement::new().native(DType::BF16).native(DType::F16).driver((12, 4));
        needs.judge_by(info, Ok(1)).refusals.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(judged((9, 0), (13, 0)).is_empty() && judged((8, 0), (12, 4)).is_empty());
    let turing = judged((7, 5), (12, 2));
    assert_eq!(turing.len(), 2, "{turing:?}");
    assert!(turing[0].contains("cannot compute bf16 natively: it lacks arithmetic on bf16"), "{turing:?}");
    assert!(turing[1].contains("driver for CUDA 12.2, 12.4 is needed"), "{turing:?}");
}

#[test]
fn an_allocator_s_cache_counts_as_free_and_its_limit_counts() {
    let device = open("16GiB");
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    drop(allocator.alloc_bytes(10 << 30, device.default_stream()).unwrap());
    assert!(Placement::new().bytes(12 << 30).choose(std::slice::from_ref(&device)).is_err());
    assert!(Placement::new().bytes(12 << 30).choose(std::slice::from_ref(&allocator)).is_ok());
    allocator.set_limit(Some(11 << 30));
    assert!(Placement::new().bytes(12 << 30).choose(std::slice::from_ref(&allocator)).is_err());
}

#[test]
fn devices_with_and_without_an_allocator_are_chosen_among() {
    let devices = [open("8GiB"), open("16GiB")];
    let allocator = Allocator::new(&devices[1], Config::default()).unwrap();
    allocator.set_limit(Some(4 << 30));
    let transfer = Transfer::new(&allocator).unwrap();
    let candidates = [Candidate::from(&devices[0]), Candidate::from(&transfer)];
    let chosen = Placement::new().bytes(6 << 30).choose(&candidates).unwrap();
    assert_eq!(chosen.index(), Some(0));
    assert!(chosen.to_string().contains("with 8.00 GiB free for the 6.00 GiB needed"), "{chosen}");
    assert!(Placement::new().bytes(6 << 30).choose(&[transfer]).is_err());
}

#[test]
fn a_device_that_fails_is_passed_over_and_named() {
    let driver = SimDriver::new(SimConfig::parse("80GiB").unwrap());
    let devices = [Device::new(driver.clone()), open("8GiB")];
    driver.inject(Fault::Nth { operation: Some(Operation::MemoryInfo), nth: 1, code: Code::ILLEGAL_ADDRESS });
    let chosen = Placement::new().bytes(1).choose(&devices).unwrap();
    assert_eq!(chosen.index(), Some(1));
    assert!(chosen.to_string().contains("its free memory is unknown"), "{chosen}");
}

#[test]
fn parts_are_spread_by_free_memory() {
    let devices = [open("8GiB"), open("16GiB")];
    let gib = |n: u64| n << 30;
    let places = Placement::new().bytes(gib(1)).spread(&devices, &[gib(2), gib(6), gib(6), gib(3)]).unwrap();
    // 15 and 7 free: 6 to the larger (9 and 7), 6 again (3 and 7), 3 to the smaller (3 and 4), 2 to
    // the smaller.
    assert_eq!(places, [0, 1, 1, 0]);
    let error = Placement::new().spread(&devices, &[gib(12), gib(9)]).unwrap_err();
    assert!(error.to_string().contains("4.00 GiB free of the 9.00 GiB needed"), "{error}");
    assert!(Placement::new().spread(&devices, &[]).unwrap().is_empty());
}

#[test]
fn real_gpus_are_chosen_or_their_absence_is_reported() {
    match (gpus(), Placement::new().choose_gpu()) {
        (Ok(_), Ok(chosen)) => assert_eq!(chosen.device().map(|device| device.info().kind), Some(DriverKind::Cuda)),
        (Err(_), Err(TransferError::NoGpu(_))) => {
            let chosen = Placement::new().fallback(Fallback::Host).choose_gpu().unwrap();
            assert!(chosen.device().is_none() && chosen.to_string().contains("there is no device"));
        }
        (gpus, chosen) => panic!("{gpus:?} {chosen:?}"),
    }
}
