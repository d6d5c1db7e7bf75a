//! The holders of a device's memory, in processes of their own, which find NVML in the stand-in.

use aquifer_device::{Code, Device, Driver, MemoryUsers};
use aquifer_standin::{OTHER_PID, RESERVED, in_process};

use crate::bench::{Bench, MIB, standin};

/// Runs a test in a process that finds NVML.
fn with_nvml<F: FnOnce()>(more: &[(&str, &str)], body: F) {
    let path = standin().path().to_str().unwrap();
    in_process(&[&[("AQUIFER_NVML_LIBRARY", path)], more].concat(), body);
}

/// What is known where the list of processes is of no use.
fn unknown() -> MemoryUsers {
    let mut users = MemoryUsers::default();
    users.driver = Some(RESERVED);
    users
}

fn others(users: &MemoryUsers) -> Vec<(Option<u32>, u64)> {
    users.others.iter().map(|one| (one.pid, one.bytes)).collect()
}

/// The other process is in both lists, and counts once. Each device has its own processes.
#[test]
fn each_process_and_the_driver_are_known() {
    with_nvml(&[], || {
        let (bench, idle) = (Bench::new(), Bench::new());
        bench.driver.alloc(3 * MIB).unwrap();
        let users = bench.driver.memory_users();
        assert_eq!((users.own, others(&users), users.driver), (Some(3 * MIB), Vec::new(), Some(RESERVED)));
        bench.device.set_other_process_bytes(5 * MIB);
        let users = Device::new(bench.driver.clone()).memory_users();
        assert_eq!((users.own, others(&users)), (Some(3 * MIB), vec![(Some(OTHER_PID), 5 * MIB)]));
        assert_eq!(idle.driver.memory_users().own, Some(0));
    });
}

#[test]
fn nobody_is_known_where_this_process_has_another_id() {
    with_nvml(&[("AQUIFER_STANDIN_PID", "7")], || {
        let bench = Bench::new();
        bench.device.set_other_process_bytes(5 * MIB);
        assert_eq!(bench.driver.memory_users(), unknown());
    });
}

#[test]
fn what_nvml_does_not_answer_is_unknown() {
    with_nvml(&[], || {
        let bench = Bench::new();
        bench.device.set_other_process_bytes(5 * MIB);
        let known = bench.driver.memory_users();
        let without = |function: &str| {
            standin().fail(function, 1, Code(3)).unwrap();
            bench.driver.memory_users()
        };
        assert_eq!(without("cuDeviceGetUuid_v2"), MemoryUsers::default());
        assert_eq!(without("nvmlDeviceGetHandleByUUID"), MemoryUsers::default());
        assert_eq!(without("nvmlDeviceGetComputeRunningProcesses_v3"), unknown());
        assert_eq!(without("nvmlDeviceGetGraphicsRunningProcesses_v3"), known);
        let users = without("nvmlDeviceGetMemoryInfo_v2");
        assert_eq!((users.driver, users.others), (None, known.others));
    });
}

#[test]
fn without_nvml_nothing_is_known() {
    in_process(&[("AQUIFER_NVML_LIBRARY", "/nowhere/nvml.so")], || {
        assert_eq!(Bench::new().driver.memory_users(), MemoryUsers::default());
    });
}

#[test]
fn a_device_that_shares_the_hosts_memory_has_as_much_free_as_the_host() {
    let shared = Bench::on("gb10", &[]);
    assert!(shared.driver.info().shares_host_memory && !Bench::new().driver.info().shares_host_memory);
    let before = shared.driver.memory_info().unwrap();
    assert!((1..before.total).contains(&before.free), "what this machine has, not what the stand-in says: {before:?}");
}
