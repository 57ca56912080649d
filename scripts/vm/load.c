/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads for the tests of the CPU scheduler (scripts/vm/job-*.sh). Every command ends by itself and
 * prints `name value` lines; the job compares them with what is due.
 *
 *   load requests WORKERS MESSENGERS THINK_US WORK_US SECONDS   message threads wake workers by futex
 *   load closed WORKERS SLEEP_NS WORK_NS SECONDS   the same with one message thread, exponential times, and work
 *                                    by the clock of CPU time, so that all CPUs work at full speed
 *   load share SECONDS GROUP...      CPU time of hogs; a group is N@CPUS[:NICE][:rt][:naps], "4@0-1:5"
 *   load leave SECONDS CPU GROUP     half of the hogs end, as they are found on CPU; then the others' time
 *   load delay SECONDS CPUS GROUP... how late a sleeper on CPUS wakes up beside hogs
 *   load steps SECONDS STEP_US WORK_US GROUP...   a timer wakes an engine's thread at each step, which wakes an API
 *                                    server by Unix socket, which works: how late its tokens are, and gaps between them
 *   load pair SECONDS CPUS CPUS      two threads wake each other by pipe; the longest round
 *   load soak SECONDS SEED           all of it, changing at random; how late a sleeper was, less what
 *                                    the machine itself was late by (raw_*: with it)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;

#define THREADS 256
#define SAMPLES 200000

static atomic_bool stop;

static void fail(const char *what)
{
	fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
	exit(2);
}

static u64 clock_of(clockid_t id)
{
	struct timespec t;

	clock_gettime(id, &t);
	return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}

static u64 now(void) { return clock_of(CLOCK_MONOTONIC); }

static void sleep_ns(u64 ns)
{
	struct timespec t = { (time_t)(ns / 1000000000), (long)(ns % 1000000000) };

	nanosleep(&t, NULL);
}

/* Work that is the same number of instructions each time, 1 ns each by the clock of the VM. */
static void spin(u64 ns)
{
	for (volatile u64 i = 0; i < ns / 5; i++)
		;
}

static long futex(atomic_uint *word, int op, unsigned value)
{
	return syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static u64 mix(u64 x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

/* "0-2,5"; "f" for all. */
static cpu_set_t cpus(const char *text)
{
	cpu_set_t set;
	char *end;

	CPU_ZERO(&set);
	if (*text == 'f') {
		for (int i = 0; i < 64; i++)
			CPU_SET(i, &set);
		return set;
	}
	while (*text >= '0' && *text <= '9') {
		long from = strtol(text, &end, 10), to = from;

		if (*end == '-')
			to = strtol(end + 1, &end, 10);
		for (; from <= to && from < CPU_SETSIZE; from++)
			CPU_SET(from, &set);
		text = *end == ',' ? end + 1 : end;
	}
	return set;
}

static void settle(const cpu_set_t *set, int nice, bool rt)
{
	struct sched_param param = { .sched_priority = 10 };

	if (sched_setaffinity(0, sizeof(*set), set))
		fail("sched_setaffinity");
	if (nice && setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice))
		fail("setpriority");
	if (rt && sched_setscheduler(0, SCHED_FIFO, &param))
		fail("sched_setscheduler");
}

/* ---- hogs --------------------------------------------------------------------------------- */

struct hog {
	pthread_t thread;
	cpu_set_t set;
	int nice;
	bool rt;
	bool naps;		/* sleeps 3 ms after each 20 us */
	int leave;		/* -1, or ends if found there when told to */
	_Atomic u64 ran;	/* CPU time, ns */
	atomic_bool left;
};

static struct hog hogs[THREADS];
static int nr_hogs;
static atomic_bool leave_now;
static atomic_int nr_left;

static void *run_hog(void *arg)
{
	struct hog *h = arg;

	settle(&h->set, h->nice, h->rt);
	while (!stop) {
		spin(20000);
		h->ran = clock_of(CLOCK_THREAD_CPUTIME_ID);
		if (h->naps)
			sleep_ns(3000000);
		if (leave_now && h->leave >= 0 && sched_getcpu() == h->leave &&
		    atomic_fetch_add(&nr_left, 1) < nr_hogs / 2) {
			h->left = true;
			break;
		}
	}
	return NULL;
}

/* N@CPUS[:NICE][:rt][:naps] */
static void add_hogs(char *text, int leave)
{
	char *at = strchr(text, '@'), *colon, *rest;
	int n = atoi(text), nice = 0;
	bool rt = false, naps = false;

	if (!at || n < 1 || nr_hogs + n > THREADS) {
		fprintf(stderr, "load: a group is N@CPUS[:NICE][:rt][:naps], not %s\n", text);
		exit(2);
	}
	colon = strchr(at, ':');
	if (colon)
		*colon++ = 0;
	for (; colon && *colon; colon = rest) {
		rest = strchr(colon, ':');
		if (rest)
			*rest++ = 0;
		if (!strcmp(colon, "rt"))
			rt = true;
		else if (!strcmp(colon, "naps"))
			naps = true;
		else
			nice = atoi(colon);
	}
	for (; n; n--) {
		struct hog *h = &hogs[nr_hogs++];

		h->set = cpus(at + 1);
		h->nice = nice;
		h->rt = rt;
		h->naps = naps;
		h->leave = leave;
		if (pthread_create(&h->thread, NULL, run_hog, h))
			fail("pthread_create");
	}
}

/* CPU time of all hogs over `seconds`, ms per second and hog, then the sum. */
static void measure_hogs(double seconds)
{
	u64 before[THREADS], start = now(), took, sum = 0;

	for (int i = 0; i < nr_hogs; i++)
		before[i] = hogs[i].ran;
	sleep_ns((u64)(seconds * 1e9));
	took = now() - start;
	for (int i = 0; i < nr_hogs; i++) {
		u64 ran = hogs[i].ran - before[i];

		if (hogs[i].left)
			continue;
		printf("hog%d %llu\n", i, (unsigned long long)(ran * 1000 / took));
		sum += ran;
	}
	printf("cpus %.3f\n", (double)sum / (double)took);
}

/* ---- samples ------------------------------------------------------------------------------ */

struct samples {
	u64 *at;
	u64 n;
};

static void record(struct samples *s, u64 v)
{
	if (!s->at)
		s->at = malloc(SAMPLES * sizeof(u64));
	if (s->at && s->n < SAMPLES)
		s->at[s->n++] = v;
}

static int compare(const void *a, const void *b)
{
	u64 x = *(const u64 *)a, y = *(const u64 *)b;

	return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s)
{
	if (!s->n) {
		printf("%s_count 0\n", name);
		return;
	}
	qsort(s->at, s->n, sizeof(u64), compare);
	printf("%s_count %llu\n%s_p50_us %.1f\n%s_p99_us %.1f\n%s_max_us %.1f\n", name,
	       (unsigned long long)s->n, name, (double)s->at[s->n / 2] / 1e3, name,
	       (double)s->at[s->n * 99 / 100] / 1e3, name, (double)s->at[s->n - 1] / 1e3);
}

/* ---- requests: message threads and workers ------------------------------------------------- */

struct worker {
	pthread_t thread;
	struct messenger *of;
	_Atomic(struct worker *) next;
	atomic_uint go;
	_Atomic u64 woken_at;
	u64 done, draw;
	struct samples wake, request;
};

struct messenger {
	pthread_t thread;
	atomic_uint posted;
	_Atomic(struct worker *) waiting;	/* workers that want the next request */
};

static u64 think_ns, work_ns;
static bool is_closed;		/* times are exponential, work is CPU time */
static struct worker workers[THREADS];
static struct messenger messengers[THREADS];

static u64 exponential(u64 *draw, u64 mean)
{
	double unit = (double)(mix((*draw)++) >> 11) / 9007199254740992.0;

	return (u64)(-log1p(-unit) * (double)mean);
}

/*
 * Uses that much CPU time. The CPUs of the VM take turns, so instructions take longer the more CPUs are busy;
 * time passes on all of them. `pause` ends a turn: else one CPU would use up the time in which another one
 * has work of the kernel's to do.
 */
static void work_for(u64 ns)
{
	u64 start = clock_of(CLOCK_THREAD_CPUTIME_ID), used = 0, end;

	while (used < ns && !stop) {
		end = now() + ns - used;
		do {
			for (int i = 0; i < 4 && now() < end; i++)
				;
			__builtin_ia32_pause();
		} while (now() < end);
		used = clock_of(CLOCK_THREAD_CPUTIME_ID) - start;
	}
}

static void *run_worker(void *arg)
{
	struct worker *w = arg;

	while (!stop) {
		struct worker *head = w->of->waiting;
		u64 seen, asked = now();

		atomic_store(&w->go, 0);
		do
			w->next = head;
		while (!atomic_compare_exchange_weak(&w->of->waiting, &head, w));
		atomic_fetch_add(&w->of->posted, 1);
		futex(&w->of->posted, FUTEX_WAKE, 1);
		while (!atomic_load(&w->go) && !stop)
			futex(&w->go, FUTEX_WAIT, 0);
		seen = now();
		if (stop)
			break;
		record(&w->wake, seen - w->woken_at);
		if (is_closed) {
			work_for(exponential(&w->draw, work_ns));
			record(&w->request, now() - asked);
			w->done++;
			if (think_ns)
				sleep_ns(exponential(&w->draw, think_ns));
			continue;
		}
		if (think_ns)
			sleep_ns(think_ns);
		spin(work_ns);
		w->done++;
	}
	return NULL;
}

static void *run_messenger(void *arg)
{
	struct messenger *m = arg;

	while (!stop) {
		unsigned posted = atomic_load(&m->posted);
		struct worker *w = atomic_exchange(&m->waiting, NULL);

		if (!w) {
			futex(&m->posted, FUTEX_WAIT, posted);
			continue;
		}
		while (w) {
			struct worker *next = w->next;

			w->woken_at = now();
			atomic_store(&w->go, 1);
			futex(&w->go, FUTEX_WAKE, 1);
			w = next;
		}
	}
	return NULL;
}

static void start_requests(int nr_workers, int nr_messengers)
{
	for (int i = 0; i < nr_messengers; i++)
		if (pthread_create(&messengers[i].thread, NULL, run_messenger, &messengers[i]))
			fail("pthread_create");
	for (int i = 0; i < nr_workers; i++) {
		workers[i].of = &messengers[i % nr_messengers];
		workers[i].draw = (u64)i << 32;
		if (pthread_create(&workers[i].thread, NULL, run_worker, &workers[i]))
			fail("pthread_create");
	}
}

static void end_requests(int nr_workers, int nr_messengers, struct samples *wake, u64 *done)
{
	for (int i = 0; i < nr_workers; i++) {
		do {
			atomic_store(&workers[i].go, 1);
			futex(&workers[i].go, FUTEX_WAKE, 1);
		} while (pthread_tryjoin_np(workers[i].thread, NULL) && (sleep_ns(1000000), true));
		*done += workers[i].done;
		for (u64 j = 0; j < workers[i].wake.n; j++)
			record(wake, workers[i].wake.at[j]);
	}
	for (int i = 0; i < nr_messengers; i++) {
		do {
			atomic_fetch_add(&messengers[i].posted, 1);
			futex(&messengers[i].posted, FUTEX_WAKE, 1);
		} while (pthread_tryjoin_np(messengers[i].thread, NULL) && (sleep_ns(1000000), true));
	}
}

static int requests(int nr_workers, int nr_messengers, double seconds)
{
	struct samples wake = { 0 }, request = { 0 };
	u64 done = 0, start = now(), took;

	start_requests(nr_workers, nr_messengers);
	sleep_ns((u64)(seconds * 1e9));
	stop = true;
	took = now() - start;
	end_requests(nr_workers, nr_messengers, &wake, &done);
	printf("requests_per_s %.0f\n", (double)done * 1e9 / (double)took);
	print_samples("wake", &wake);
	for (int i = 0; i < nr_workers; i++)
		for (u64 j = 0; j < workers[i].request.n; j++)
			record(&request, workers[i].request.at[j]);
	if (request.n)
		print_samples("request", &request);
	return 0;
}

/* ---- sleeper ------------------------------------------------------------------------------ */

/* Sleeps 1 ms again and again; how much longer it was. */
static void sleep_through(double seconds, struct samples *late)
{
	u64 end = now() + (u64)(seconds * 1e9);

	while (now() < end) {
		u64 start = now(), took;

		sleep_ns(1000000);
		took = now() - start;
		record(late, took > 1000000 ? took - 1000000 : 0);
	}
}

/* ---- pair --------------------------------------------------------------------------------- */

struct pair {
	int there[2], back[2];
	cpu_set_t a, b;
	struct samples round;
};

static void *run_answer(void *arg)
{
	struct pair *p = arg;
	char c;

	settle(&p->b, 0, false);
	while (read(p->there[0], &c, 1) == 1)
		if (write(p->back[1], &c, 1) != 1)
			break;
	return NULL;
}

static void *run_ask(void *arg)
{
	struct pair *p = arg;
	char c = 'x';

	settle(&p->a, 0, false);
	while (!stop) {
		u64 start = now();

		if (write(p->there[1], &c, 1) != 1 || read(p->back[0], &c, 1) != 1)
			break;
		record(&p->round, now() - start);
	}
	close(p->there[1]);
	return NULL;
}

static void start_pair(struct pair *p, pthread_t *ask, pthread_t *answer)
{
	if (pipe(p->there) || pipe(p->back))
		fail("pipe");
	if (pthread_create(ask, NULL, run_ask, p) || pthread_create(answer, NULL, run_answer, p))
		fail("pthread_create");
}

/* ---- steps -------------------------------------------------------------------------------- */

static int tokens[2];
static struct samples token_late, token_gap;

static void *run_server(void *arg)
{
	u64 due, last = 0, until, at;
	(void)arg;

	while (read(tokens[0], &due, sizeof(due)) == (ssize_t)sizeof(due)) {
		until = clock_of(CLOCK_THREAD_CPUTIME_ID) + work_ns;
		while (clock_of(CLOCK_THREAD_CPUTIME_ID) < until)
			;
		at = now();
		record(&token_late, at - due);
		if (last)
			record(&token_gap, at - last);
		last = at;
	}
	return NULL;
}

static int steps(double seconds, u64 step_ns)
{
	pthread_t server;
	u64 due = now(), end = due + (u64)(seconds * 1e9);

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, tokens))
		fail("socketpair");
	if (pthread_create(&server, NULL, run_server, NULL))
		fail("pthread_create");
	while (due < end) {
		struct timespec t;

		due += step_ns;
		t = (struct timespec){ (time_t)(due / 1000000000), (long)(due % 1000000000) };
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
		if (write(tokens[1], &due, sizeof(due)) != (ssize_t)sizeof(due))
			fail("write");
	}
	close(tokens[1]);
	pthread_join(server, NULL);
	print_samples("late", &token_late);
	print_samples("gap", &token_gap);
	return 0;
}

/* ---- soak --------------------------------------------------------------------------------- */

#define SOAK_HOGS 6
#define SOAK_PAIRS 3

static cpu_set_t random_mask(u64 *seed, long nr_cpus)
{
	cpu_set_t set;
	u64 word = mix((*seed)++);

	CPU_ZERO(&set);
	CPU_SET((size_t)(word >> 32) % (size_t)nr_cpus, &set);
	for (long i = 0; i < nr_cpus; i++)
		if (word & (1u << i))
			CPU_SET(i, &set);
	return set;
}

/* Sleeps, computes a little, changes mask and nice value, forks. */
static void *run_restless(void *arg)
{
	u64 seed = (u64)(uintptr_t)arg;
	long nr_cpus = sysconf(_SC_NPROCESSORS_ONLN);

	while (!stop) {
		u64 word = mix(seed++);

		sleep_ns(word % 3000000);
		spin((word >> 8) % 300000);
		if (word >> 40 & 1) {
			cpu_set_t set = random_mask(&seed, nr_cpus);

			sched_setaffinity(0, sizeof(set), &set); /* a CPU may be off */
		}
		if ((word >> 41 & 7) == 0)
			setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), (int)(word >> 50 & 15));
		if ((word >> 44 & 7) == 0) {
			pid_t child = fork();

			if (!child) {
				spin(200000);
				_exit(0);
			}
			if (child > 0)
				waitpid(child, NULL, 0);
		}
	}
	return NULL;
}

/* Set once a real-time burst of 1 ms or more has ended. */
static volatile bool burst_ended;

/* A real-time task that takes a CPU for up to 50 ms now and then. */
static void *run_bursts(void *arg)
{
	u64 seed = (u64)(uintptr_t)arg;
	cpu_set_t all = cpus("f");

	settle(&all, 0, true);
	while (!stop) {
		u64 word = mix(seed++), length = (word >> 32) % 50000000;

		sleep_ns(20000000 + word % 200000000);
		spin(length);
		if (length >= 1000000)
			burst_ended = true;
	}
	return NULL;
}

/*
 * The control: real-time sleepers, one bound to each CPU, which no scheduler of ours can delay. Where
 * they are late, the machine was: a host that runs something else than this CPU, or interrupts.
 */
struct interval {
	u64 due, woke;
};

#define INTERVALS 4096

struct control {
	pthread_t thread;
	int cpu;
	int n;
	struct interval late[INTERVALS];
};

static struct control controls[64];
static int nr_controls;
static struct interval *sleeps;
static int nr_sleeps;

static void *run_control(void *arg)
{
	struct control *c = arg;
	struct sched_param param = { .sched_priority = 90 };
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET((size_t)c->cpu, &set);
	settle(&set, 0, false);
	if (sched_setscheduler(0, SCHED_FIFO, &param))
		fail("sched_setscheduler");
	while (!stop) {
		u64 due = now() + 4000000, woke;

		sleep_ns(4000000);
		woke = now();
		if (woke - due > 500000 && c->n < INTERVALS)
			c->late[c->n++] = (struct interval){ due, woke };
	}
	return NULL;
}

static void start_controls(void)
{
	cpu_set_t online;

	if (sched_getaffinity(0, sizeof(online), &online))
		fail("sched_getaffinity");
	for (int cpu = 0; cpu < 64; cpu++) {
		struct control *c = &controls[nr_controls];

		if (!CPU_ISSET((size_t)cpu, &online))
			continue;
		c->cpu = cpu;
		nr_controls++;
		if (pthread_create(&c->thread, NULL, run_control, c))
			fail("pthread_create");
	}
}

/* How much of an interval the control of the CPU that was latest in it was late by. */
static u64 machine_late(const struct interval *i)
{
	u64 most = 0;

	for (int c = 0; c < nr_controls; c++) {
		u64 sum = 0;

		for (int j = 0; j < controls[c].n; j++) {
			const struct interval *l = &controls[c].late[j];
			u64 from = l->due > i->due ? l->due : i->due;
			u64 to = l->woke < i->woke ? l->woke : i->woke;

			if (to > from)
				sum += to - from;
		}
		if (sum > most)
			most = sum;
	}
	return most;
}

/* Sleeps 1 ms again and again, and keeps when it woke up and should have. */
static void sleep_and_keep(double seconds)
{
	u64 end = now() + (u64)(seconds * 1e9), due;

	sleeps = malloc(SAMPLES * sizeof(*sleeps));
	if (!sleeps)
		fail("malloc");
	while ((due = now() + 1000000) < end && nr_sleeps < SAMPLES) {
		sleep_ns(1000000);
		sleeps[nr_sleeps++] = (struct interval){ due, now() };
	}
}

static int soak(double seconds, u64 seed)
{
	long nr_cpus = sysconf(_SC_NPROCESSORS_ONLN);
	int nr_workers = 1 + (int)(mix(seed) % 16), nr_messengers = 1 + (int)(mix(seed + 1) % 2);
	struct pair pairs[SOAK_PAIRS];
	pthread_t ask[SOAK_PAIRS], answer[SOAK_PAIRS], restless[4], bursts;
	struct samples late = { 0 }, raw = { 0 }, control = { 0 }, wake = { 0 };
	u64 draw = seed * 1000, done = 0;

	memset(pairs, 0, sizeof(pairs));
	think_ns = 300000;
	work_ns = 100000 + mix(seed + 2) % 400000;
	start_requests(nr_workers, nr_messengers);
	for (int i = 0; i < SOAK_HOGS; i++) {
		struct hog *h = &hogs[nr_hogs++];

		h->set = random_mask(&draw, nr_cpus);
		if (i % 3 == 0)
			h->set = cpus("f");
		h->nice = (int)(mix(draw++) % 20);
		h->leave = -1;
		if (pthread_create(&h->thread, NULL, run_hog, h))
			fail("pthread_create");
	}
	for (int i = 0; i < SOAK_PAIRS; i++) {
		pairs[i].a = random_mask(&draw, nr_cpus);
		pairs[i].b = random_mask(&draw, nr_cpus);
		start_pair(&pairs[i], &ask[i], &answer[i]);
	}
	for (int i = 0; i < 4; i++)
		if (pthread_create(&restless[i], NULL, run_restless, (void *)(uintptr_t)(seed * 77 + (u64)i)))
			fail("pthread_create");
	if (pthread_create(&bursts, NULL, run_bursts, (void *)(uintptr_t)(seed * 99)))
		fail("pthread_create");
	/*
	 * The scheduler learns of real-time bursts by the first one, which may keep a task waiting as long
	 * as it runs (docs/sched.md). The promise that is checked holds from there on.
	 */
	while (!burst_ended)
		sleep_ns(1000000);
	start_controls();
	sleep_and_keep(seconds);
	stop = true;
	for (int i = 0; i < nr_controls; i++)
		pthread_join(controls[i].thread, NULL);
	for (int i = 0; i < nr_sleeps; i++) {
		u64 was = sleeps[i].woke > sleeps[i].due ? sleeps[i].woke - sleeps[i].due : 0;
		u64 theirs = was > 500000 ? machine_late(&sleeps[i]) : 0;

		record(&raw, was);
		record(&late, was - (theirs < was ? theirs : was));
	}
	record(&control, 0);
	for (int i = 0; i < nr_controls; i++)
		for (int j = 0; j < controls[i].n; j++)
			record(&control, controls[i].late[j].woke - controls[i].late[j].due);
	end_requests(nr_workers, nr_messengers, &wake, &done);
	for (int i = 0; i < nr_hogs; i++)
		pthread_join(hogs[i].thread, NULL);
	for (int i = 0; i < SOAK_PAIRS; i++) {
		pthread_join(ask[i], NULL);
		pthread_join(answer[i], NULL);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(restless[i], NULL);
	pthread_join(bursts, NULL);
	printf("workers %d\nrequests_per_s %.0f\n", nr_workers, (double)done / seconds);
	print_samples("late", &late);
	print_samples("raw", &raw);
	print_samples("control", &control);
	print_samples("wake", &wake);
	for (int i = 0; i < SOAK_PAIRS; i++)
		print_samples("pair", &pairs[i].round);
	return 0;
}

int main(int argc, char **argv)
{
	const char *command = argc > 2 ? argv[1] : "";
	double seconds = argc > 2 ? atof(argv[2]) : 0;
	cpu_set_t all = cpus("f");
	struct sched_param param = { .sched_priority = 50 };

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(command, "requests") && argc == 7) {
		think_ns = (u64)atoll(argv[4]) * 1000;
		work_ns = (u64)atoll(argv[5]) * 1000;
		return requests(atoi(argv[2]), atoi(argv[3]), atof(argv[6]));
	}
	if (!strcmp(command, "closed") && argc == 6) {
		is_closed = true;
		/* The kernel would lengthen sleeps by up to 50 us. Threads inherit it. */
		prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
		think_ns = (u64)atoll(argv[3]);
		work_ns = (u64)atoll(argv[4]);
		return requests(atoi(argv[2]), 1, atof(argv[5]));
	}
	if (!strcmp(command, "share") && argc > 3) {
		for (int i = 3; i < argc; i++)
			add_hogs(argv[i], -1);
		/* Else hogs would keep the clock from us. */
		sched_setscheduler(0, SCHED_FIFO, &param);
		sleep_ns(300000000);
		measure_hogs(seconds);
		return 0;
	}
	if (!strcmp(command, "leave") && argc == 5) {
		add_hogs(argv[4], atoi(argv[3]));
		sched_setscheduler(0, SCHED_FIFO, &param);
		sleep_ns(300000000);
		leave_now = true;
		sleep_ns(100000000);
		leave_now = false;
		measure_hogs(seconds);
		return 0;
	}
	if (!strcmp(command, "delay") && argc > 4) {
		struct samples late = { 0 };

		all = cpus(argv[3]);
		for (int i = 4; i < argc; i++)
			add_hogs(argv[i], -1);
		settle(&all, 0, false);
		sleep_ns(300000000);
		sleep_through(seconds, &late);
		print_samples("late", &late);
		return 0;
	}
	if (!strcmp(command, "steps") && argc > 4) {
		prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
		work_ns = (u64)atoll(argv[4]) * 1000;
		for (int i = 5; i < argc; i++)
			add_hogs(argv[i], -1);
		sleep_ns(300000000);
		return steps(seconds, (u64)atoll(argv[3]) * 1000);
	}
	if (!strcmp(command, "pair") && argc == 5) {
		struct pair p = { .a = cpus(argv[3]), .b = cpus(argv[4]) };
		pthread_t ask, answer;

		start_pair(&p, &ask, &answer);
		sleep_ns((u64)(seconds * 1e9));
		stop = true;
		pthread_join(ask, NULL);
		pthread_join(answer, NULL);
		print_samples("round", &p.round);
		return 0;
	}
	if (!strcmp(command, "soak") && argc == 4)
		return soak(seconds, (u64)atoll(argv[3]));
	fprintf(stderr, "load: see the head of scripts/vm/load.c\n");
	return 2;
}
