//! Driver calls that fail, and devices that are lost.

use aquifer_device::Code;
use aquifer_sim::Fault;

use super::*;

/// A program with every driver call of the pool.
fn program(bench: &Bench) -> Result<(), TransferError> {
    bench.pool.set_limit(Some(8 << 20));
    let mut first = bench.pool.alloc_from(&vec![1_u8; 3 << 20])?;
    bench.upload(&first)?;
    let mut second = bench.pool.alloc_zeroed::<u8>(3 << 20)?;
    bench.download(&mut second)?;
    first.write()?.fill(2);
    bench.upload(&first)?;
    drop((first, second));
    // Waits for the copies, and releases their memory.
    let third = bench.pool.alloc_zeroed::<u8>(7 << 20)?;
    bench.upload(&third)?;
    drop(third);
    bench.pool.trim_to(1 << 20)?;
    bench.pool.empty_cache()?;
    let own = bench.pool.register(vec![1_u8; 10_000])?;
    bench.upload(&own)?;
    own.into_vec()?;
    Ok(())
}

#[test]
fn the_pool_works_after_any_failed_call() {
    let mut failures = 0;
    for code in [Code(999), Code::OUT_OF_MEMORY] {
        for nth in 1.. {
            let bench = Bench::new();
            bench.sim.inject(Fault::Nth { operation: None, nth, code });
            let calls = bench.device.driver_calls();
            let outcome = program(&bench);
            let made = bench.device.driver_calls().since(&calls).total();
            failures += u32::from(outcome.is_err());
            bench.sim.clear_faults();
            program(&bench).unwrap_or_else(|error| panic!("call {nth} failed with {code:?}, and then {error}"));
            bench.check_over();
            if made < nth {
                break;
            }
        }
    }
    assert!(failures > 20, "{failures}");
}

#[test]
fn no_call_hangs_after_the_device_is_lost_at_any_call() {
    for nth in 1.. {
        let bench = Bench::new();
        bench.sim.inject(Fault::LostAt { nth });
        let calls = bench.device.driver_calls();
        let outcome = program(&bench);
        if bench.device.driver_calls().since(&calls).total() < nth {
            break;
        }
        // The device may be lost at a call whose error the pool ignores.
        if let Err(error) = outcome {
            assert!(error.is_device_lost(), "call {nth}: {error}");
        }
        bench.pool.set_limit(None);
        assert!(bench.pool.alloc::<u8>(30 << 20).unwrap_err().is_device_lost());
        assert_eq!(bench.sim.take_violations(), []);
    }
}

/// Memory whose copies may still run is never handed out again.
#[test]
fn memory_in_flight_on_a_lost_device_is_lost_with_it() {
    let bench = Bench::new();
    let buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    bench.upload(&buffer).unwrap();
    bench.sim.inject(Fault::LostAt { nth: 1 });
    assert!(buffer.into_vec().is_err_and(|returned| returned.error.is_device_lost()), "an upload may still read it");
    // The other half of the slab is idle, but of no use without the device.
    for bytes in [1 << 19, 1 << 20] {
        let error = bench.pool.alloc::<u8>(bytes).unwrap_err();
        assert!(error.is_device_lost(), "{error}");
    }
    assert!(bench.pool.empty_cache().is_err());
}
