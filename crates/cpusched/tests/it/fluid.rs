//! Weighted max-min fair shares of tasks with CPU masks, as a fluid: the answer that the policy's shares
//! are compared with. An independent computation, by water-filling with a maximum flow.

/// The greatest flow from tasks (at most `limit[i]` each) to CPUs (at most 1 each) along masks.
fn flow(masks: &[u32], limit: &[f64], cpus: usize) -> f64 {
    let n = masks.len();
    let mut used = vec![vec![0.0; cpus]; n];
    let (mut of_task, mut of_cpu) = (vec![0.0; n], vec![0.0; cpus]);
    loop {
        // Breadth-first search for a task with something left to a CPU with something left.
        let mut from_task: Vec<Option<usize>> = vec![None; cpus];
        let mut from_cpu: Vec<Option<usize>> = vec![None; n];
        let mut seen = vec![false; n];
        let mut queue: Vec<usize> = (0..n).filter(|&i| limit[i] - of_task[i] > 1e-9).collect();
        for &i in &queue {
            seen[i] = true;
        }
        let mut end = None;
        let mut at = 0;
        'search: while at < queue.len() {
            let task = queue[at];
            at += 1;
            for cpu in (0..cpus).filter(|c| masks[task] >> c & 1 == 1) {
                if from_task[cpu].is_some() {
                    continue;
                }
                from_task[cpu] = Some(task);
                if 1.0 - of_cpu[cpu] > 1e-9 {
                    end = Some(cpu);
                    break 'search;
                }
                for other in 0..n {
                    if used[other][cpu] > 1e-9 && !seen[other] {
                        seen[other] = true;
                        from_cpu[other] = Some(cpu);
                        queue.push(other);
                    }
                }
            }
        }
        let Some(end) = end else {
            return of_task.iter().sum();
        };
        let (mut by, mut cpu) = (1.0 - of_cpu[end], end);
        let first = loop {
            let task = from_task[cpu].expect("on the path");
            match from_cpu[task] {
                None => break task,
                Some(back) => {
                    by = f64::min(by, used[task][back]);
                    cpu = back;
                }
            }
        };
        by = by.min(limit[first] - of_task[first]);
        of_task[first] += by;
        of_cpu[end] += by;
        let mut cpu = end;
        loop {
            let task = from_task[cpu].expect("on the path");
            used[task][cpu] += by;
            let Some(back) = from_cpu[task] else { break };
            used[task][back] -= by;
            cpu = back;
        }
    }
}

/// CPUs that each hog is due: `(mask, weight)`.
pub(crate) fn due(tasks: &[(u32, u32)], cpus: usize) -> Vec<f64> {
    let masks: Vec<u32> = tasks.iter().map(|t| t.0).collect();
    let weight: Vec<f64> = tasks.iter().map(|t| f64::from(t.1)).collect();
    let mut fixed: Vec<Option<f64>> = vec![None; tasks.len()];
    while fixed.iter().any(Option::is_none) {
        let at = |r: f64, extra: Option<usize>| -> Vec<f64> {
            let of = |i: usize| {
                let more = if extra == Some(i) { 1e-4 } else { 0.0 };
                fixed[i].unwrap_or((r * weight[i]).min(1.0)) + more
            };
            (0..tasks.len()).map(of).collect()
        };
        let fits = |want: &[f64], short: f64| {
            want.iter().all(|w| *w <= 1.0 + 1e-9)
                && flow(&masks, want, cpus) >= want.iter().sum::<f64>() - short
        };
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..60 {
            let mid = f64::midpoint(low, high);
            // A task that reaches a whole CPU stops there: it is fixed below.
            let bounded = (0..tasks.len()).all(|i| fixed[i].is_some() || mid * weight[i] <= 1.0);
            if bounded && fits(&at(mid, None), 1e-6) {
                low = mid;
            } else {
                high = mid;
            }
        }
        let base = at(low, None);
        let stuck: Vec<usize> = (0..tasks.len())
            .filter(|&i| fixed[i].is_none() && !fits(&at(low, Some(i)), 5e-5))
            .collect();
        assert!(!stuck.is_empty(), "some task limits the rate");
        for i in stuck {
            // A little less than found, which is a little more than fits.
            fixed[i] = Some(base[i] * (1.0 - 1e-5));
        }
    }
    fixed.into_iter().map(|f| f.expect("fixed above")).collect()
}
