//! Functions that fail on order, by their CUDA name: for what the simulated device never hears of,
//! such as `cuInit` or `cuCtxSetCurrent`, and for programs that are to see each of their calls fail
//! once.
//!
//! Orders belong to the thread that gave them, so tests in parallel do not disturb each other;
//! those of the environment (`AQUIFER_STANDIN_FAIL`) hold for all threads. A call that fails on
//! order does nothing else, and a code of a lost device loses nothing: for that there are the
//! simulated device's own faults.

use std::cell::RefCell;

use aquifer_device::Code;
use parking_lot::Mutex;

use crate::abi::Answer;
use crate::process::Process;

/// An order: the nth call of a function, or of all of them, fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    /// `None` counts the calls of all functions but those that only name errors.
    function: Option<String>,
    /// How many such calls go by before it strikes.
    left: u64,
    code: Code,
}

impl Order {
    /// The `nth` call (from 1) of `function`, or of `any`, fails with `code`. `None` for an order
    /// that could not be meant.
    pub(crate) fn new(function: &str, nth: u64, code: Code) -> Option<Order> {
        let sensible = nth > 0 && code.0 != 0 && crate::errors::is_known(code);
        let known = function == "any" || crate::exports::find(function).is_some();
        let function = (function != "any").then(|| function.to_owned());
        (sensible && known).then(|| Order { function, left: nth - 1, code })
    }

    /// Reads `FUNCTION#N:CODE`, such as `cuInit#1:999`.
    pub(crate) fn parse(text: &str) -> Option<Order> {
        let (function, rest) = text.trim().split_once('#')?;
        let (nth, code) = rest.split_once(':')?;
        let code = code.parse().ok().map(Code).or_else(|| Code::from_name(code))?;
        Order::new(function, nth.parse().ok()?, code)
    }

    /// Counts a call. The code, when the order strikes now.
    fn count(&mut self, name: &str) -> Option<Code> {
        let names_errors = matches!(name, "cuGetErrorName" | "cuGetErrorString");
        let meant = self.function.as_ref().map_or(!names_errors, |function| function == name);
        if !meant {
            return None;
        }
        match self.left.checked_sub(1) {
            None => Some(self.code),
            Some(left) => {
                self.left = left;
                None
            }
        }
    }
}

/// Orders that are not carried out yet.
#[derive(Debug, Default)]
pub(crate) struct Orders(Vec<Order>);

impl Orders {
    pub(crate) const fn new(orders: Vec<Order>) -> Orders {
        Orders(orders)
    }

    /// Counts a call against all orders. The first that strikes decides the code; those that struck
    /// are done.
    fn strike(&mut self, name: &str) -> Option<Code> {
        let mut struck = None;
        self.0.retain_mut(|order| match order.count(name) {
            Some(code) => {
                struck.get_or_insert(code);
                false
            }
            None => true,
        });
        struck
    }
}

thread_local! {
    static OF_THREAD: RefCell<Orders> = const { RefCell::new(Orders::new(Vec::new())) };
}

/// Fails where an order of the calling thread or of the environment strikes.
pub(crate) fn strike(name: &str) -> Answer {
    // While a thread exits, its orders are gone.
    let of_thread = OF_THREAD.try_with(|orders| orders.borrow_mut().strike(name)).ok().flatten();
    let of_environment = || Process::get().orders().and_then(|orders: &Mutex<Orders>| orders.lock().strike(name));
    match of_thread.or_else(of_environment) {
        Some(code) => Err(code),
        None => Ok(()),
    }
}

/// Adds an order of the calling thread.
pub(crate) fn add(order: Order) {
    OF_THREAD.with_borrow_mut(|orders| orders.0.push(order));
}

/// How many orders of the calling thread have not struck.
pub(crate) fn left() -> usize {
    OF_THREAD.with_borrow(|orders| orders.0.len())
}

/// Forgets the orders of the calling thread.
pub(crate) fn clear() {
    OF_THREAD.with_borrow_mut(|orders| orders.0.clear());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_of_a_function_is_struck_once() {
        let mut orders = Orders::new(vec![Order::parse("cuMemAlloc_v2#2:out_of_memory").unwrap()]);
        let names = ["cuMemAlloc_v2", "cuMemFree_v2", "cuMemAlloc_v2", "cuMemAlloc_v2"];
        assert_eq!(names.map(|name| orders.strike(name)), [None, None, Some(Code(2)), None]);
        assert!(orders.0.is_empty());
    }

    #[test]
    fn any_counts_all_but_names_of_errors() {
        let mut orders = Orders::new(vec![Order::parse("any#2:999").unwrap()]);
        let names = ["cuInit", "cuGetErrorString", "cuDeviceGet"];
        assert_eq!(names.map(|name| orders.strike(name)), [None, None, Some(Code(999))]);
    }

    #[test]
    fn orders_that_make_no_sense_are_refused() {
        for text in ["", "cuInit", "cuInit#0:999", "cuInit#1:0", "cuInit#1:12345", "cuMagic#1:999", "cuInit#x:999"] {
            assert_eq!(Order::parse(text), None, "{text}");
        }
    }
}
