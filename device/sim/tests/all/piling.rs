//! Programs that run for long hold no more events than the device is behind, although the host
//! never asks about their streams.

use std::time::Duration;

use aquifer_device::{Device, Operation};

use crate::common::device;

const ROUNDS: u64 = 2_000;
/// The driver's events that a program has at most, of which one round of it records one or two.
const FEW: u64 = 200;

fn events_created(device: &Device) -> u64 {
    device.driver_calls().of(Operation::CreateEvent)
}

#[test]
fn t3_events_of_streams_that_wait_for_each_other_do_not_pile_up() {
    let driver = device(0);
    let device = Device::new(driver.clone());
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    for _ in 0..ROUNDS {
        two.wait_for(&one.tick()).unwrap();
        one.wait_for(&two.tick()).unwrap();
        driver.advance(Duration::from_millis(1));
    }
    let (created, queries) = (events_created(&device), device.driver_calls().of(Operation::QueryEvent));
    assert!(created <= FEW, "{created} events for {ROUNDS} rounds");
    assert!(queries <= 2 * ROUNDS / 16, "{queries} queries for {ROUNDS} rounds");
    // The ticks before are known to be done.
    assert!(one.timeline().frontier() + FEW > one.tick().n());
}
